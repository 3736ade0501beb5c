"""The fence of a collaborator: refuses calls of an older attempt, step or try.

One object per ledger, training worker, replica or host; asked first in every mutating call.
"""

import threading

from rlcore.errors import FencedError
from rlcore.types import CallKey

KEPT_STEPS = 8
"""Tries are remembered for this many steps; a call of an older step is refused."""


class Fence:
    """Admits calls of one run by attempt and try.

    Example:
        >>> fence = Fence("run-1", attempt=2)
        >>> fence.admit(CallKey(run_id="run-1", attempt=2, global_step=7, phase="update_actor"))
    """

    def __init__(self, run_id: str, attempt: int) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self._newest_step = 0
        self._tries: dict[tuple[int, int, str], int] = {}
        # Control calls come in a thread of their own.
        self._lock = threading.RLock()

    def admit(self, key: CallKey) -> None:
        """Let `key` pass and remember it; a higher attempt takes over.

        Raises:
            FencedError: another run, a lower attempt, a step long past, or a lower try of the same
                (step, inner step, phase).
        """
        if key.run_id != self.run_id:
            raise FencedError(f"{key} was refused: this belongs to run {self.run_id}")
        with self._lock:
            self._admit(key)

    def _admit(self, key: CallKey) -> None:
        self.advance(key.attempt)
        if key.global_step <= self._newest_step - KEPT_STEPS:
            raise FencedError(f"{key} was refused: step {self._newest_step} has been seen")
        place = (key.global_step, key.inner_step, key.phase)
        newest = self._tries.get(place, 0)
        if key.try_number < newest:
            raise FencedError(
                f"{key} was refused: try {newest} of this phase has been seen, or this one given up"
            )
        self._tries[place] = key.try_number
        if key.global_step > self._newest_step:
            self._newest_step = key.global_step
            oldest = key.global_step - KEPT_STEPS
            self._tries = {p: t for p, t in self._tries.items() if p[0] > oldest}

    def give_up(self, key: CallKey) -> None:
        """Refuse this try of the phase, and lower ones, from now on: before a later one is seen."""
        with self._lock:
            if (key.run_id, key.attempt) == (self.run_id, self.attempt):
                place = (key.global_step, key.inner_step, key.phase)
                self._tries[place] = max(self._tries.get(place, 0), key.try_number + 1)

    def advance(self, attempt: int) -> bool:
        """Move to `attempt`; return whether it is a new one.

        Raises:
            FencedError: `attempt` is lower than the one seen.
        """
        with self._lock:
            if attempt < self.attempt:
                raise FencedError(
                    f"run {self.run_id} attempt {attempt} was refused: attempt {self.attempt} has "
                    "begun"
                )
            if attempt == self.attempt:
                return False
            self.attempt = attempt
            self._newest_step = 0
            self._tries = {}
            return True
