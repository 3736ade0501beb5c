"""Texts that end a response, found token by token: the same rule in every engine.

Token in, token out: a response ends with the token that completes a text, whatever that token holds
besides. Only the response counts, not the prompt before it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.engine import EngineRequest
from rlcore.rollout.sampling_params import SamplingParams

CONTEXT = 8
"""Tokens that are decoded before those that may hold a text: some write a piece of a character."""


class StopStrings:
    """Watches the tokens of one response.

    Example:
        >>> stops = StopStrings(tokenizer, ["###"], earlier=[])
        >>> is_over = stops.feed(token_id)
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], earlier: Iterable[int]) -> None:
        """Begin with the tokens that this turn had `earlier`, before it was resumed."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        # Every token writes at least a byte, so that no text has more tokens than bytes.
        self._width = max(len(text.encode()) for text in texts) + CONTEXT
        self._tokens = list(earlier)[-self._width :]

    def feed(self, token_id: int) -> bool:
        """Take the next token; return whether a text is complete now."""
        self._tokens = [*self._tokens, token_id][-self._width :]
        written = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        return any(text in written for text in self._texts)


class StopStringReader:
    """Makes a `StopStrings` per request; reads the tokenizer when one asks for the first time.

    Args:
        model_path: Hugging Face folder with a tokenizer.
        trust_remote_code: Let the folder run code of its own.
    """

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._tokenizer: Any = None

    def check(self, params: SamplingParams) -> None:
        """Refuse stop strings where there is no tokenizer.

        Raises:
            ConfigError: the model folder has none.
        """
        if params.stop and self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._model_path, self._trust_remote_code)
            except DataError as error:
                raise ConfigError(f"sampling_params: stop={list(params.stop)}: {error}") from error

    def of(self, request: EngineRequest) -> StopStrings | None:
        """Return what watches a checked request; None: it has no stop strings."""
        params = request.params
        if not params.stop:
            return None
        earlier = request.prompt_ids[len(request.prompt_ids) - params.position :]
        return StopStrings(self._tokenizer, params.stop, earlier)
