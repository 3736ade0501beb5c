"""The order in which prompts are used: a pure function of the position, so resume is a number."""

from functools import lru_cache

import numpy as np

from rlcore.errors import DataError


class PromptOrder:
    """Position in the run -> (epoch, row).

    Each epoch is a permutation of its own, cut to whole batches as in verl (`drop_last`): the rows
    left over are other ones in each epoch when shuffled.

    Example:
        >>> order = PromptOrder(num_rows=10, batch_size=4, shuffle=False, seed=0)
        >>> order.steps_per_epoch, order.locate(0), order.locate(8)
        (2, (0, 0), (1, 0))
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_rows < batch_size:
            raise DataError(
                f"{num_rows} prompts are fewer than one batch of {batch_size} "
                "(data.train_batch_size)"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the data."""
        return self.num_rows // self.batch_size

    def locate(self, position: int) -> tuple[int, int]:
        """Return epoch and row of the `position`-th prompt of the run, from 0."""
        epoch, offset = divmod(position, self.steps_per_epoch * self.batch_size)
        if not self.shuffle:
            return epoch, offset
        return epoch, int(_permutation(self.num_rows, self.seed, epoch)[offset])


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
