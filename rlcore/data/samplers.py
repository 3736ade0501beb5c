"""Samplers: classes that choose the rows of an epoch (`data.sampler`), with verl's constructor.

A sampler is made by `cls(data_source=dataset, data_config=config.data, **kwargs)`; iterating it
gives the rows of one epoch. Two kinds keep a run repeatable:

* Without `update`, the order may depend on nothing but the arguments. Epoch e is what the e-th
  iteration of a new object gives, or the first after `set_epoch(e)` where there is such a method.
* With `update(results)`, the order also follows from how prompts went. Then `state_dict()` and
  `load_state_dict()` (JSON values) hold everything; they are in every checkpoint, and the order of
  an epoch is fixed by the state at the first prompt of it.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset
from rlcore.data.order import EpochPlan
from rlcore.errors import ConfigError, DataError
from rlcore.registry import Registry
from rlcore.user_code import load_user_object

SAMPLERS: Registry[type[Any]] = Registry("prompt sampler")

SamplerState = dict[str, Any]
"""`live`: the state now; `epochs`: epoch -> the state by which it was planned."""
MAX_STATE_BYTES = 150_000
"""Of one state: up to four of them travel with every phase, which takes 1 MiB at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """How a prompt's sessions went."""

    index: int
    """Row of the data set."""
    rewards: list[float]
    accuracies: list[float]
    """In [0, 1]: `acc` where the reward function gave it, else the reward, clipped."""


class PromptSampler:
    """The configured sampler of a run, asked in a repeatable way.

    Raises:
        ConfigError: the class is missing or lacks what a repeatable order needs.
    """

    def __init__(self, config: RunConfig, dataset: PromptDataset) -> None:
        self._dataset = dataset
        self._settings = config.data.sampler
        # verl's samplers take their seed from here.
        self._data = config.data.model_copy(update={"seed": config.data_seed})
        self._class = _sampler_class(config)
        self.name = self._settings.class_name
        self.learns = hasattr(self._class, "update")
        stateful = all(hasattr(self._class, name) for name in ("state_dict", "load_state_dict"))
        if self.learns and not stateful:
            raise ConfigError(
                f"data.sampler: {self.name} has update() and needs state_dict() and "
                "load_state_dict(), or a resumed run would go another way"
            )

    def begin(self, state: SamplerState | None, epochs: Sequence[int]) -> SamplerState | None:
        """Return the state with the plan of `epochs` fixed, and forget the epochs before."""
        if not self.learns:
            return None
        state = state or {"live": self._live(self._make()), "epochs": {}}
        planned = {str(epoch): state["epochs"].get(str(epoch), state["live"]) for epoch in epochs}
        return {"live": state["live"], "epochs": planned}

    def observe(
        self, state: SamplerState | None, results: Sequence[PromptResult]
    ) -> SamplerState | None:
        """Return the state after results; plans that were fixed stay."""
        if not self.learns:
            return None
        state = self.begin(state, []) if state is None else state
        assert state is not None
        sampler = self._make(state["live"])
        sampler.update(list(results))
        return {"live": self._live(sampler), "epochs": state["epochs"]}

    def plan(self, state: SamplerState | None) -> EpochPlan:
        """Return the order that follows from a state of `begin`."""

        def plan(epoch: int, count: int) -> np.ndarray:
            if not self.learns:
                return self._rows(self._iteration(epoch), count)
            assert state is not None, "begin() fixes an epoch's plan before it is asked for"
            return self._rows(self._iteration(epoch, state["epochs"][str(epoch)]), count)

        return plan

    def check(self, count: int) -> None:
        """Check that the first epoch has `count` rows and is the same when asked again.

        Raises:
            DataError: it is not.
        """
        state = self.begin(None, [0])
        first, second = self.plan(state)(0, count), self.plan(state)(0, count)
        if not np.array_equal(first, second):
            raise DataError(
                f"data.sampler: {self.name} gives another order each time it is made, so a resumed "
                "run would see other prompts; seed it from data_config.seed"
            )

    def _make(self, live: Any = None) -> Any:
        try:
            sampler = self._class(
                data_source=self._dataset, data_config=self._data, **self._settings.kwargs
            )
        except TypeError as error:
            raise ConfigError(
                f"data.sampler: {self.name} must take (data_source, data_config) and the keys of "
                f"data.sampler.kwargs: {error}"
            ) from error
        if live is not None:
            sampler.load_state_dict(live)
        return sampler

    def _live(self, sampler: Any) -> Any:
        text = json.dumps(sampler.state_dict())
        if len(text) > MAX_STATE_BYTES:
            raise DataError(
                f"data.sampler: the state of {self.name} has {len(text)} bytes, more than "
                f"{MAX_STATE_BYTES}: it is in every checkpoint and goes with every phase"
            )
        return json.loads(text)

    def _iteration(self, epoch: int, live: Any = None) -> Iterable[int]:
        sampler = self._make(live)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif not self.learns:
            for _ in range(epoch):  # what a generator of random numbers has given before
                for _ in itertools.islice(iter(sampler), len(self._dataset)):
                    pass
        return iter(sampler)

    def _rows(self, rows: Iterable[int], count: int) -> np.ndarray:
        taken = np.fromiter(itertools.islice(rows, count), dtype=np.int64)
        if len(taken) < count:
            raise DataError(
                f"data.sampler: {self.name} gave {len(taken)} rows for an epoch of {count} prompts "
                f"({len(self._dataset)} rows, in whole batches of data.train_batch_size)"
            )
        wrong = taken[(taken < 0) | (taken >= len(self._dataset))]
        if len(wrong):
            raise DataError(
                f"data.sampler: {self.name} gave row {wrong[0]} of {len(self._dataset)} rows"
            )
        return taken


def load_sampler(config: RunConfig, dataset: PromptDataset) -> PromptSampler | None:
    """Return the sampler that `data.sampler` names, or None for the built-in order."""
    if config.data.sampler.class_name is None:
        return None
    return PromptSampler(config, dataset)


def _sampler_class(config: RunConfig) -> type[Any]:
    # Registers the built-in ones.
    from rlcore.data import curriculum  # noqa: F401

    settings = config.data.sampler
    assert settings.class_name is not None
    if settings.class_path is None:
        return SAMPLERS.get(settings.class_name)
    found = load_user_object(settings.class_path, settings.class_name)
    if not isinstance(found, type) or not hasattr(found, "__iter__"):
        raise ConfigError(
            f"{settings.class_path}: {settings.class_name} (data.sampler) must be a class with "
            "__iter__, which gives the rows of one epoch"
        )
    return found
