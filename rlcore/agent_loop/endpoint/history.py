"""Finds the turn that a request continues: the client sends everything again, tokens stay as are.

A conversation continues a turn if it begins with that turn's messages and the answer that we gave
to them; a text or a list of token ids does if it begins with an earlier prompt and its response.
What begins otherwise is new: the client has changed or left out something that the model had seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlcore.agent_loop.endpoint.turns import Turn

Keys = tuple[str, ...]
"""One for the tools, one for each message; see `messages.key_of`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """A completion as its client knows it."""

    seen: str
    """Prompt and response."""
    hidden: tuple[str, ...]
    """What the response's tokens hold besides, in the order in which to look for it."""
    turn: Turn


@dataclass(kw_only=True, slots=True)
class History:
    """The finished requests of a session."""

    turns: list[Turn] = field(default_factory=list[Turn])
    """In the order in which they ended."""
    _chats: dict[Keys, list[Turn]] = field(default_factory=dict[Keys, list[Turn]])
    _texts: list[_Text] = field(default_factory=list[_Text])

    def add_chat(self, turn: Turn, keys: Keys) -> None:
        """Record a turn of a conversation.

        Args:
            turn: What was sampled.
            keys: Of the tools, the request's messages and our answer.
        """
        self.turns.append(turn)
        self._chats.setdefault(keys, []).append(turn)

    def add_text(self, turn: Turn, seen: str, hidden: Sequence[str]) -> None:
        """Record a completion.

        Args:
            turn: What was sampled.
            seen: The prompt and the response as its client read it.
            hidden: Texts that the tokens go on with and the client was not shown: all of it, or the
                stop string at its beginning.
        """
        self.turns.append(turn)
        self._texts.append(_Text(seen=seen, hidden=tuple(hidden), turn=turn))

    def add_ids(self, turn: Turn) -> None:
        """Record a completion whose prompt was token ids."""
        self.turns.append(turn)

    def find_chat(self, keys: Keys) -> tuple[Turn, int] | None:
        """Return the last turn that a conversation continues, and how many messages it covers."""
        for size in range(len(keys), 1, -1):
            if turns := self._chats.get(keys[:size]):
                return _fresh(turns), size - 1
        return None

    def find_text(self, prompt: str) -> tuple[Turn, str] | None:
        """Return the longest turn that a text continues, and the part that is new."""
        found = [text for text in self._texts if prompt.startswith(text.seen)]
        if not found:
            return None
        longest = max(len(text.seen) for text in found)
        turn = _fresh([text.turn for text in found if len(text.seen) == longest])
        [text] = [text for text in found if text.turn is turn]
        rest = prompt[longest:]
        for hidden in text.hidden:
            if hidden and rest.startswith(hidden):
                return turn, rest[len(hidden) :]
        return turn, rest

    def find_ids(self, prompt: Sequence[int]) -> tuple[Turn, list[int]] | None:
        """Return the longest turn whose tokens a prompt begins with, and the part that is new."""
        found: list[tuple[int, Turn]] = []
        for turn in self.turns:
            ids = turn.ids()
            if list(prompt[: len(ids)]) == ids:
                found.append((len(ids), turn))
        if not found:
            return None
        longest = max(size for size, _ in found)
        turn = _fresh([turn for size, turn in found if size == longest])
        return turn, list(prompt[longest:])


def _fresh(turns: Sequence[Turn]) -> Turn:
    """Return the oldest of those that the fewest have continued.

    Equal answers to equal questions are continued one by one: none is shared without need.
    """
    return min(turns, key=lambda turn: turn.num_begun)
