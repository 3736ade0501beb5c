"""The order in which prompts are used: a pure function of the position, so resume is a number."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlcore.errors import DataError

EpochPlan = Callable[[int, int], np.ndarray]
"""(epoch, count) -> the first `count` rows of that epoch; a pure function."""


class Place(NamedTuple):
    """What stands at one position of the run."""

    epoch: int
    row: int
    """Of the data set, from 0."""
    repeat: int = 0
    """How often the epoch had this row before: 0 where each row is used once per epoch."""


class PromptOrder:
    """Position in the run -> (epoch, row).

    Each epoch has an order of its own, cut to whole batches as in verl (`drop_last`): the rows left
    over are other ones in each epoch when shuffled.

    Example:
        >>> order = PromptOrder(num_rows=10, batch_size=4, shuffle=False, seed=0)
        >>> order.steps_per_epoch, order.locate(0).row, order.locate(8).epoch
        (2, 0, 1)
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        plan: EpochPlan | None = None,
    ) -> None:
        """Take over what the order follows from.

        Args:
            num_rows: Rows of the data set, which is also an epoch's length before it is cut.
            batch_size: Prompts per step.
            shuffle: Whether `plan` None is a permutation or the file's order.
            seed: Of the permutations.
            plan: The rows of each epoch, if it is neither.

        Raises:
            DataError: there are fewer rows than a batch.
        """
        if num_rows < batch_size:
            raise DataError(
                f"{num_rows} prompts are fewer than one batch of {batch_size} "
                "(data.train_batch_size)"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._plan = plan
        self._planned: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the data."""
        return self.num_rows // self.batch_size

    @property
    def epoch_length(self) -> int:
        """Prompts of an epoch."""
        return self.steps_per_epoch * self.batch_size

    def locate(self, position: int) -> Place:
        """Return what stands at `position` of the run, from 0."""
        epoch, offset = divmod(position, self.epoch_length)
        if self._plan is None:
            if not self.shuffle:
                return Place(epoch, offset)
            return Place(epoch, int(_permutation(self.num_rows, self.seed, epoch)[offset]))
        rows, repeats = self._rows_of(epoch, self._plan)
        return Place(epoch, int(rows[offset]), int(repeats[offset]))

    def _rows_of(self, epoch: int, plan: EpochPlan) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._planned:
            rows = plan(epoch, self.epoch_length)
            while len(self._planned) >= 2:  # positions move on: two epochs are enough
                del self._planned[min(self._planned)]
            self._planned[epoch] = (rows, count_earlier(rows))
        return self._planned[epoch]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def count_earlier(rows: np.ndarray) -> np.ndarray:
    """Return for each item how many equal ones stand before it."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    run_lengths = np.diff(np.r_[starts, len(rows)])
    earlier = np.empty(len(rows), dtype=np.int64)
    earlier[order] = np.arange(len(rows)) - np.repeat(starts, run_lengths)
    return earlier


def weighted_plan(
    rows_per_file: Sequence[int], weights: Sequence[float], *, shuffle: bool, seed: int
) -> EpochPlan:
    """Return a plan in which file i has the share `weights[i]` of every epoch.

    The rows of a file are used in turn: all of them once before any of them again, over the epochs
    too. A file with little weight may need several epochs, one with much may be used several times
    in one. Shares are exact to one prompt per epoch.

    Args:
        rows_per_file: Rows of each file; they are numbered through.
        weights: Positive; only their proportion counts.
        shuffle: Mix files and rows at random; otherwise files alternate evenly, rows in file order.
        seed: Of the mixing.
    """
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    firsts = np.cumsum([0, *rows_per_file])

    def plan(epoch: int, count: int) -> np.ndarray:
        earlier = _uses(shares, epoch * count)
        counts = _uses(shares, (epoch + 1) * count) - earlier
        labels = np.repeat(np.arange(len(counts)), counts)
        if shuffle:
            labels = np.random.default_rng([seed, epoch, len(counts)]).permutation(labels)
        else:
            numbers = np.concatenate(
                [np.arange(b, b + c) for b, c in zip(earlier, counts, strict=True)]
            )
            labels = labels[np.argsort((numbers + 0.5) / shares[labels], kind="stable")]
        rows = np.empty(count, dtype=np.int64)
        for file, num_rows in enumerate(rows_per_file):
            uses = np.arange(earlier[file], earlier[file] + counts[file])
            rows[labels == file] = firsts[file] + _in_turn(uses, num_rows, shuffle, [seed, file])
        return rows

    return plan


def _uses(shares: np.ndarray, total: int) -> np.ndarray:
    """Return how often each file was used in the first `total` prompts of all epochs.

    Use j of a file with share s is due at (j + 1/2) / s, and the earliest come first (Webster's
    method): the counts sum to `total`, keep the proportions, and never fall as `total` grows.
    """
    surely = np.maximum(0, np.floor(shares * total).astype(np.int64) - len(shares) - 1)
    missing = total - int(surely.sum())
    due = (surely[:, None] + np.arange(missing) + 0.5) / shares[:, None]
    earliest = np.argsort(due, axis=None, kind="stable")[:missing] // max(1, missing)
    return surely + np.bincount(earliest, minlength=len(shares))


def _in_turn(uses: np.ndarray, num_rows: int, shuffle: bool, seed: list[int]) -> np.ndarray:
    """Return the row of each use of a file: pass after pass, each a permutation of its own."""
    passes, offsets = np.divmod(uses, num_rows)
    if not shuffle:
        return offsets
    rows = np.empty(len(uses), dtype=np.int64)
    for number in np.unique(passes):
        here = passes == number
        order = np.random.default_rng([*seed, int(number), 1]).permutation(num_rows)
        rows[here] = order[offsets[here]]
    return rows
