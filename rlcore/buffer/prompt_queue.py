"""Prompts of one status in the order in which they are due, without sorting them at every look.

Looking at the first k costs O(k), removing O(1) amortised: a claim or a sample costs the same with
100 stored prompts and with 100,000. Adding is O(1) in the order in which prompts are mostly added,
oldest first, and a move of pointers otherwise.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

SLACK = 64
"""Entries of prompts that are gone, beyond one per held prompt, before the list is built anew."""


class Queued(Protocol):
    """What the queue reads of a prompt."""

    uid: str
    global_step: int
    order: int


P = TypeVar("P", bound=Queued)
Key = tuple[int, ...]


def by_age(prompt: Queued) -> Key:
    """Oldest dispatch step first; prompts of one step as they were fed."""
    return prompt.global_step, prompt.order


class PromptQueue(Generic[P]):
    """A sorted list with a dict: entries of prompts that left are skipped when they come up."""

    def __init__(self, key: Callable[[P], Key] = by_age) -> None:
        self._key = key
        self._held: dict[str, tuple[int, P]] = {}
        self._sorted: list[tuple[Key, int, str]] = []
        self._start = 0
        self._num_added = 0
        self.by_step: Counter[int] = Counter()
        """Held prompts per dispatch step."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[P]:
        """Yield the prompts in no particular order."""
        return (prompt for _, prompt in self._held.values())

    def add(self, prompt: P) -> None:
        """Hold a prompt; its key must not change while it is held."""
        self._num_added += 1
        self._held[prompt.uid] = (self._num_added, prompt)
        self.by_step[prompt.global_step] += 1
        entry = (self._key(prompt), self._num_added, prompt.uid)
        bisect.insort(self._sorted, entry, lo=self._start)

    def remove(self, uid: str) -> None:
        """Drop a prompt.

        Raises:
            KeyError: it is not held.
        """
        _, prompt = self._held.pop(uid)
        self.by_step[prompt.global_step] -= 1
        if not self.by_step[prompt.global_step]:
            del self.by_step[prompt.global_step]
        if len(self._sorted) > 2 * len(self._held) + SLACK:
            self._sorted = [entry for entry in self._sorted if self._prompt_of(entry) is not None]
            self._start = 0

    def first(self, count: int) -> list[P]:
        """Return the `count` prompts that are due first, in order; fewer if there are fewer."""
        found: list[P] = []
        place = self._start
        while place < len(self._sorted) and len(found) < count:
            prompt = self._prompt_of(self._sorted[place])
            if prompt is not None:
                found.append(prompt)
            elif not found:
                self._start = place + 1
            place += 1
        return found

    def _prompt_of(self, entry: tuple[Key, int, str]) -> P | None:
        number, prompt = self._held.get(entry[2], (0, None))
        return prompt if number == entry[1] else None

    def in_order(self) -> list[P]:
        """Return all prompts in order; sorts them."""
        return sorted(self, key=self._key)
