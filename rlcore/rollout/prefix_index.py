"""Which slots hold the keys of which prompt: sessions of a group share one prefill."""


class PrefixIndex:
    """Maps a prompt (without its last token) to the slots whose first columns hold its keys.

    A slot keeps its prompt's columns after its request ended, until another request takes it: an
    idle slot writes past them only.
    """

    def __init__(self, num_slots: int) -> None:
        self._prefix_of: list[tuple[int, ...] | None] = [None] * num_slots
        self._slots_of: dict[tuple[int, ...], set[int]] = {}

    def find(self, prefix: tuple[int, ...]) -> int | None:
        """Return a slot that holds `prefix`."""
        return min(self._slots_of.get(prefix, ()), default=None)

    def remember(self, slot: int, prefix: tuple[int, ...]) -> None:
        """Note that `slot` holds `prefix` now."""
        self.forget(slot)
        self._prefix_of[slot] = prefix
        self._slots_of.setdefault(prefix, set()).add(slot)

    def forget(self, slot: int) -> None:
        """Note that `slot` is about to be overwritten."""
        prefix, self._prefix_of[slot] = self._prefix_of[slot], None
        if prefix is None:
            return
        self._slots_of[prefix].discard(slot)
        if not self._slots_of[prefix]:
            del self._slots_of[prefix]

    def clear(self) -> None:
        """Forget all: the weights changed or the memory is gone."""
        self._prefix_of = [None] * len(self._prefix_of)
        self._slots_of.clear()
