"""Prompts of one status in the order in which they are due, without sorting them at every look.

Adding, removing and looking at the first k cost O(log n) and O(k log n): a claim or a sample costs
the same with 100 stored prompts and with 100,000.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

SLACK = 64
"""Entries of prompts that are gone, beyond one per held prompt, before the heap is built anew."""


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
    """A heap with a dict: entries of prompts that left are skipped when they come up."""

    def __init__(self, key: Callable[[P], Key] = by_age) -> None:
        self._key = key
        self._held: dict[str, tuple[int, P]] = {}
        self._heap: list[tuple[Key, int, str]] = []
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
        heapq.heappush(self._heap, (self._key(prompt), self._num_added, prompt.uid))

    def remove(self, uid: str) -> None:
        """Drop a prompt.

        Raises:
            KeyError: it is not held.
        """
        _, prompt = self._held.pop(uid)
        self.by_step[prompt.global_step] -= 1
        if not self.by_step[prompt.global_step]:
            del self.by_step[prompt.global_step]
        if len(self._heap) > 2 * len(self._held) + SLACK:
            self._heap = [(self._key(p), number, p.uid) for number, p in self._held.values()]
            heapq.heapify(self._heap)

    def first(self, count: int) -> list[P]:
        """Return the `count` prompts that are due first, in order; fewer if there are fewer."""
        found: list[P] = []
        taken: list[tuple[Key, int, str]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            number, prompt = self._held.get(entry[2], (0, None))
            if prompt is None or number != entry[1]:
                continue
            taken.append(entry)
            found.append(prompt)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found

    def in_order(self) -> list[P]:
        """Return all prompts in order; sorts them."""
        return sorted(self, key=self._key)
