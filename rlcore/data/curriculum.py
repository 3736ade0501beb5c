"""A curriculum by success rate: prompts that are solved always or never are used less.

With GRPO a group whose sessions all got the same reward has advantage 0. The variance of a
session's outcome, p (1 - p) for success rate p, says how much there is to learn from a prompt.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlcore.config.data import DataConfig
from rlcore.data.samplers import SAMPLERS, PromptResult
from rlcore.errors import ConfigError

UNSEEN = 255
SCALE = 254
MAX_ROWS = 200_000
"""One byte per row, compressed, has to fit into the state of a checkpoint."""


@SAMPLERS.register("success_rate")
class SuccessRateSampler:
    """Draws the rows of an epoch with weights `floor + (1 - floor) * 4 p (1 - p)`.

    p is a running mean of the success rate of the row's sessions; a row that was not seen yet has
    weight 1. So the first epoch uses every row once, and from the second on a row may come several
    times or not at all. Draws are systematic: a row with k times the mean weight comes k times,
    rounded up or down.

    Args:
        data_source: The data set; only its length matters.
        data_config: Gives the seed.
        floor: Weight of a row that is always or never solved, so that it is tried again.
        momentum: Share of the old mean in the new one.

    Raises:
        ConfigError: a setting is out of range, or the data set is too large.
    """

    def __init__(
        self,
        data_source: Any,
        data_config: DataConfig,
        floor: float = 0.1,
        momentum: float = 0.5,
    ) -> None:
        num_rows = len(data_source)
        if not 0 < floor <= 1 or not 0 <= momentum < 1:
            raise ConfigError(
                f"data.sampler.kwargs: floor={floor} must be in (0, 1] and momentum={momentum} in "
                "[0, 1)"
            )
        if num_rows > MAX_ROWS:
            raise ConfigError(
                f"data.sampler.class_name=success_rate keeps a rate per row, for {MAX_ROWS} rows "
                f"at most; there are {num_rows}: set data.train_max_samples"
            )
        self._floor = floor
        self._momentum = momentum
        self._seed = data_config.seed or 0
        self._epoch = 0
        self._rates = np.full(num_rows, UNSEEN, dtype=np.uint8)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self._epoch = epoch

    def update(self, results: Sequence[PromptResult]) -> None:
        """Take in how prompts went."""
        for result in results:
            if not result.accuracies:
                continue
            rate = sum(result.accuracies) / len(result.accuracies)
            known = int(self._rates[result.index])
            if known != UNSEEN:
                rate = self._momentum * known / SCALE + (1 - self._momentum) * rate
            self._rates[result.index] = round(rate * SCALE)

    def weights(self) -> np.ndarray:
        """Return the weight of each row."""
        rates = self._rates / SCALE
        learnable = self._floor + (1 - self._floor) * 4 * rates * (1 - rates)
        return np.where(self._rates == UNSEEN, 1.0, learnable)

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng([self._seed, self._epoch, 7])
        order = generator.permutation(len(self._rates))
        ends = np.cumsum(self.weights()[order])
        ticks = (np.arange(len(order)) + generator.random()) * ends[-1] / len(order)
        drawn = order[np.minimum(np.searchsorted(ends, ticks, side="right"), len(order) - 1)]
        return iter(generator.permutation(drawn).tolist())

    def state_dict(self) -> dict[str, str]:
        """Return the rates, packed."""
        packed = zlib.compress(self._rates.tobytes(), 9)
        return {"rates": base64.b85encode(packed).decode("ascii")}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take over the rates of `state_dict`.

        Raises:
            ConfigError: they belong to a data set of another size.
        """
        rates = np.frombuffer(zlib.decompress(base64.b85decode(state["rates"])), dtype=np.uint8)
        if len(rates) != len(self._rates):
            raise ConfigError(
                f"the checkpoint's success rates are of {len(rates)} prompts, the data set has "
                f"{len(self._rates)}: resume with the data the run was started with"
            )
        self._rates = rates.copy()
