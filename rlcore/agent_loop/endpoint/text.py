"""Tokens as a client reads them: whole characters, up to a stop string, before a tool call.

The same for an answer that is streamed and for one that is not: both are read here, token by token.
"""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class TextReader:
    """The text of one response, as far as it is sampled.

    What could still turn out to be the beginning of a stop string or of a tool call is held back.

    Attributes:
        text: All of it that is a client's to read; complete after `finish`.

    Example:
        >>> reader = TextReader(tokenizer, stops=["###"], opening=None)
        >>> text = reader.feed(token_ids) + reader.finish()
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, stops: Sequence[str], opening: str | None
    ) -> None:
        """Begin.

        Args:
            tokenizer: The policy's.
            stops: Texts that end the response and are left out.
            opening: With which a tool call begins; None: calls are not looked for.
        """
        self.text = ""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []
        self._stops = stops
        self._opening = opening
        self._num_sent = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that can be sent now."""
        for token in token_ids:
            self._pending.append(token)
            piece = self._stream.step(self._tokenizer.backend_tokenizer, token)
            if piece is not None:
                self.text += piece
                self._pending.clear()
        return self._send(min(self._end(), self._call_begins(), self._safe_length()))

    def finish(self, *, has_calls: bool = False) -> str:
        """Return the text that was held back, once there are no more tokens.

        Args:
            has_calls: The response has tool calls: its text ends before the first one.
        """
        # The beginning of a character whose other bytes were never sampled.
        self.text += str(self._tokenizer.decode(self._pending, skip_special_tokens=True))
        self._pending.clear()
        self.text = self.text[: self._end()]
        if has_calls:
            self.text = self.text[: self._call_begins()]
        return self._send(len(self.text))

    def hidden(self, token_ids: list[int]) -> list[str]:
        """Return what a finished response's tokens hold beyond `text`, longest first.

        Args:
            token_ids: All of them.
        """
        whole = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        if not whole.startswith(self.text):
            return []
        rest = whole[len(self.text) :]
        return [rest, *(stop for stop in self._stops if rest.startswith(stop))]

    def _send(self, length: int) -> str:
        sent, self._num_sent = self._num_sent, max(self._num_sent, length)
        return self.text[sent : self._num_sent]

    def _end(self) -> int:
        """Return where the first stop string begins, or the length."""
        found = [self.text.find(stop) for stop in self._stops]
        return min((place for place in found if place >= 0), default=len(self.text))

    def _call_begins(self) -> int:
        place = -1 if self._opening is None else self.text.find(self._opening)
        return len(self.text) if place < 0 else place

    def _safe_length(self) -> int:
        """Return the length without an end that may be the beginning of a text to look for."""
        wanted = [*self._stops, *([self._opening] if self._opening else [])]
        longest = max((len(text) for text in wanted), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(text.startswith(self.text[-size:]) for text in wanted):
                return len(self.text) - size
        return len(self.text)
