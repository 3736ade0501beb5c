"""A replica whose turns are written by a function: a policy for tests and for `check-env`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlcore.types import TokenOutput


class ScriptedReplica:
    """Answers with the tokens of a text and the end token, cut to the budget.

    Attributes:
        requests: Every call: the prompt's tokens and the sampling parameters.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str, int], str],
        *,
        end_token_id: int,
        version: int = 0,
    ) -> None:
        """Make a replica.

        Args:
            tokenizer: Of the run.
            write: Given the text so far and the request's seed, returns the model's turn.
            end_token_id: Ends every turn that fits its budget.
            version: Weight version of the tokens.
        """
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self._tokenizer = tokenizer
        self._write = write
        self._end = end_token_id
        self._version = version

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Return the turn."""
        del request_id
        self.requests.append((list(prompt_ids), dict(sampling_params)))
        text = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        assert isinstance(text, str)  # one sequence gives one text
        written = self._write(text, int(sampling_params["seed"]))
        ids = [*self._tokenizer(written, add_special_tokens=False)["input_ids"], self._end]
        budget = int(sampling_params["max_tokens"])
        is_whole = len(ids) <= budget
        ids = ids[:budget]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            weight_versions=[self._version] * len(ids),
            stop_reason="completed" if is_whole else "length",
        )

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return nothing: turns come whole."""
        del request_id
        return None


class TypingReplica(ScriptedReplica):
    """The same, a token at a time; ends at stop strings, and its log-probs tell tokens apart.

    Attributes:
        is_busy: Set while requests are being answered.
        is_idle: Set while none is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str, int], str],
        *,
        end_token_id: int,
        version: int = 0,
        token_s: float = 0.0,
    ) -> None:
        """Make a replica that takes `token_s` seconds for a token; see ScriptedReplica."""
        super().__init__(tokenizer, write, end_token_id=end_token_id, version=version)
        self.is_busy = asyncio.Event()
        self.is_idle = asyncio.Event()
        self._note(0)
        self._token_s = token_s
        self._partial: dict[str, TokenOutput] = {}

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Return the turn when it is written."""
        whole = await super().generate(request_id, prompt_ids, sampling_params)
        self._note(self._num_running + 1)
        try:
            return await self._type(request_id, whole, sampling_params.get("stop", ()))
        finally:
            self._note(self._num_running - 1)
            self._partial.pop(request_id, None)

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what is written so far."""
        return self._partial.get(request_id)

    def _note(self, num_running: int) -> None:
        self._num_running = num_running
        true, false = (self.is_busy, self.is_idle) if num_running else (self.is_idle, self.is_busy)
        true.set()
        false.clear()

    async def _type(self, request_id: str, whole: TokenOutput, stops: Sequence[str]) -> TokenOutput:
        for length in range(1, len(whole.token_ids) + 1):
            ids = whole.token_ids[:length]
            self._partial[request_id] = TokenOutput(
                token_ids=ids,
                log_probs=[-token / 100 for token in ids],
                weight_versions=whole.weight_versions[:length],
                stop_reason=whole.stop_reason,
            )
            if self._token_s:
                await asyncio.sleep(self._token_s)
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
            if any(stop in text for stop in stops):
                self._partial[request_id].stop_reason = "completed"
                break
        return self._partial[request_id]


def texts_by_mask(
    tokenizer: PreTrainedTokenizerBase, row: Mapping[str, np.ndarray]
) -> list[tuple[int, str]]:
    """Return a row's response as (mask, text): what the policy said and what was put between."""
    pieces: list[tuple[int, list[int]]] = []
    for token, mask in zip(row["responses"].tolist(), row["response_mask"].tolist(), strict=True):
        if not pieces or pieces[-1][0] != mask:
            pieces.append((mask, []))
        pieces[-1][1].append(token)
    return [(mask, str(tokenizer.decode(ids))) for mask, ids in pieces]
