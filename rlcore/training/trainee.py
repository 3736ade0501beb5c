"""A model in training: its optimizer steps, each made once, and what they reported.

Each optimizer step, named by (global_step, inner_step, optimizer_step), is applied once: a repeat
of a finished update returns the stored metrics, one of an interrupted update goes on where it
stopped. Policy and critic each have one.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rlcore.errors import NonFiniteLossError
from rlcore.training.batches import Rows, check_rows
from rlcore.training.plan import UpdatePlan
from rlcore.training.progress import Progress
from rlcore.training.ranks import Ranks, summed
from rlcore.training.steps import StepOutcome
from rlcore.types import CallKey

logger = logging.getLogger(__name__)

SUMMED = ("optimizer_steps", "nonfinite_steps", "trained_trajectories")


class StepMaker(Protocol):
    """What makes the steps; see `rlcore.training.steps.Updater`."""

    columns: tuple[str, ...]

    def step(self, rows: Rows, indices: Sequence[int], lr: float) -> StepOutcome:
        """Make one optimizer step, or none if a number is not finite."""
        ...

    def release_gradients(self) -> None:
        """Free the gradients' memory until the next step."""
        ...


class Trainee:
    """Applies updates exactly once.

    Args:
        name: "actor" or "critic": the prefix of its metrics.
        updater: Makes the steps.
        plan: How a batch becomes steps.
        folder: Where the rows of skipped steps are written.
        ranks: All of them call every method together.
        on_change: Called after each step that changed the weights.
    """

    def __init__(
        self,
        name: str,
        updater: StepMaker,
        plan: UpdatePlan,
        *,
        folder: Path,
        ranks: Ranks,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.updater = updater
        self.plan = plan
        self.progress = Progress()
        self._folder = folder
        self._ranks = ranks
        self._on_change = on_change

    def update(
        self,
        key: CallKey,
        rows: Rows,
        groups: Sequence[Hashable],
        steps: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, float]:
        """Make the optimizer steps of one inner step and return its metrics.

        Args:
            key: Names the inner step; a repeat returns the stored metrics.
            rows: The updater's columns, of this rank's rows.
            groups: Label (uid) of each row: mini-batches are whole groups.
            steps: Row numbers of each optimizer step, this rank's; None: of one rank that has the
                whole batch.

        Raises:
            RankDisagreementError: the ranks are at different steps.
            FencedError: a step older than one that was applied.
            DataError: a column is missing or malformed.
            NonFiniteLossError: too many steps in a row were not finite.
        """
        place = (self.progress.last_finished, self.progress.num_applied(key))
        self._ranks.agree(place, f"what has been applied to the {self.name}")
        stored = self.progress.finished(key)
        if stored is not None:
            logger.info("%s: applied already, returning the stored metrics", key)
            return stored
        check_rows(rows, self.updater.columns)
        started = time.perf_counter()
        lr = self.plan.learning_rate.at(self.progress.num_inner_steps)
        planned = self.plan.steps(key, groups) if steps is None else steps
        for position, indices in enumerate(planned):
            if position >= self.progress.num_applied(key):
                self._make_step(key, position, rows, list(indices), groups, lr)
        self.updater.release_gradients()
        metrics = self._means(self.progress.applied(key))
        metrics[f"{self.name}/lr"] = lr
        timing = "perf/update_seconds" if self.name == "actor" else "perf/update_critic_seconds"
        metrics[timing] = time.perf_counter() - started
        return self.progress.finish(key, metrics)

    def _make_step(
        self,
        key: CallKey,
        position: int,
        rows: Rows,
        indices: list[int],
        groups: Sequence[Hashable],
        lr: float,
    ) -> None:
        outcome = self.updater.step(rows, indices, lr)
        self.progress.apply(key, outcome.metrics, is_skipped=outcome.is_skipped)
        if not outcome.is_skipped:
            self._on_change()
            return
        bad = outcome.nonfinite_rows
        paths = [str(self._dump(key, position, rows, bad, groups))] if bad else []
        uids = [str(groups[i]) for i in bad]
        found = summed({"uids": u, "paths": p} for u, p in self._ranks.gather((uids, paths)))
        message = (
            f"step {key.global_step}.{key.inner_step} optimizer step {position}: the {self.name}'s "
            f"loss or gradient is not finite in {len(found['uids'])} trajectories of prompts "
            f"{', '.join(sorted(set(found['uids'])))}; the step was skipped, its rows are in "
            f"{', '.join(found['paths'])}"
        )
        if self._ranks.is_first:
            logger.error(message)
        if self.progress.num_nonfinite >= self.plan.max_nonfinite_steps:
            raise NonFiniteLossError(
                f"{message}; it was number {self.progress.num_nonfinite} in a row "
                "(trainer.max_nonfinite_steps): lower the learning rate or look at these rows"
            )

    def _dump(
        self,
        key: CallKey,
        position: int,
        rows: Rows,
        indices: list[int],
        groups: Sequence[Hashable],
    ) -> Path:
        folder = self._folder / "nonfinite"
        folder.mkdir(parents=True, exist_ok=True)
        parts = [f"step-{key.global_step:04d}.{key.inner_step}-optimizer-{position}"]
        parts += [self.name] if self.name != "actor" else []
        parts += [f"rank-{self._ranks.rank}"] if not self._ranks.is_first else []
        path = folder / ("-".join(parts) + ".pt")
        content: dict[str, Any] = {
            name: [values[i].clone() for i in indices] for name, values in rows.items()
        }
        content["groups"] = [str(groups[i]) for i in indices]
        torch.save(content, path)
        return path

    def _means(self, applied: list[dict[str, float]]) -> dict[str, float]:
        """Mean over the optimizer steps that have the metric; counters are summed."""
        names = {name for metrics in applied for name in metrics}
        values = {name: [m[name] for m in applied if name in m] for name in sorted(names)}
        return {
            f"{self.name}/{name}": sum(found) / (1 if name in SUMMED else len(found))
            for name, found in values.items()
        }
