"""The HTTP side of a reward model: what reward functions ask, whatever process they run in.

    POST /v1/chat/completions   a generative judge, in the form that OpenAI's clients speak
    POST /classify              a discriminative model: a conversation's score (as vLLM answers)
    GET  /health

Behind it are LLM servers of our own, with router and client: a request whose replica dies goes on
at another one. What cannot be answered is 400 and says why; a replica that is not there is 503.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from rlcore.data.tokenizer import TEMPLATE_ERRORS, encode_chat
from rlcore.errors import ConfigError
from rlcore.json_http import JsonServer, answering, usage
from rlcore.rollout.client import sampling_seed
from rlcore.types import TokenOutput

CHAT_OPTIONS = {
    "messages", "model", "temperature", "max_tokens", "max_completion_tokens", "seed",
}  # fmt: skip
NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "top_p": (1, None), "stream": (False, None), "stop": (None, []),
    "user": (None,), "presence_penalty": (0, None), "frequency_penalty": (0, None),
}  # fmt: skip
"""Options that may be there when they ask for what happens anyway."""


class RequestClient(Protocol):
    """What answers; see LLMServerClient.generate."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Answer one request."""
        ...


class RewardModelServer:
    """Answers requests of reward functions."""

    def __init__(
        self,
        client: RequestClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        stop_token_ids: list[int],
    ) -> None:
        """Make a server; `start` opens its port.

        Args:
            client: The replicas.
            tokenizer: The reward model's.
            seed: Of the run; a judge's answer depends on it and on the request alone.
            max_prompt_tokens: Longer prompts are refused.
            max_response_tokens: Of a judge's answer at most.
            stop_token_ids: End a judge's answer.
        """
        self._client = client
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._stop_token_ids = stop_token_ids
        self._num_requests = 0
        self._server = JsonServer(
            [
                web.post("/v1/chat/completions", answering(self.chat)),
                web.post("/classify", answering(self.classify)),
                web.get("/health", _healthy),
            ],
            name="the reward model",
        )

    async def start(self, host: str) -> str:
        """Open a free port; return `host:port`."""
        return await self._server.start(host)

    async def close(self) -> None:
        """Close the port."""
        await self._server.close()

    async def chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a conversation as the judge.

        Raises:
            ConfigError: the request is malformed, too long, or asks for what is not there.
        """
        _check_options(request)
        ids = self._encode(request.get("messages"), generates=True)
        wanted = request.get("max_completion_tokens") or request.get("max_tokens")
        budget = min(int(wanted or self._max_response_tokens), self._max_response_tokens)
        temperature = request.get("temperature")
        output = await self._client.generate(
            self._new_id(),
            ids,
            {
                "max_tokens": budget,
                "temperature": 1.0 if temperature is None else float(temperature),
                "seed": self._seed_of(request),
                "stop_token_ids": self._stop_token_ids,
            },
        )
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        reason = "stop" if output.stop_reason == "completed" else "length"
        return {
            "id": f"chatcmpl-{self._num_requests}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model") or "reward_model",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": reason,
                }
            ],
            "usage": usage(len(ids), len(output.token_ids)),
        }

    async def classify(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Score a conversation (`messages`) or a rendered one (`input`); its `probs` are logits.

        Raises:
            ConfigError: the request is malformed or too long, or the model has no head.
        """
        text = request.get("input")
        if text is None:
            ids = self._encode(request.get("messages"), generates=False)
        elif isinstance(text, str):
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            self._check_length(ids)
        else:
            raise ConfigError("input must be a text; or give messages")
        output = await self._client.generate(self._new_id(), ids, {"max_tokens": 1, "seed": 0})
        logits = output.extra_fields.get("logits")
        if logits is None:
            raise ConfigError("the reward model generates text and has no head that scores it")
        return {"object": "list", "data": [{"index": 0, "probs": logits}]}

    def _encode(self, messages: object, *, generates: bool) -> list[int]:
        if not isinstance(messages, list) or not messages:
            raise ConfigError("messages must be a list of {role, content}")
        try:
            ids = encode_chat(self._tokenizer, messages, {}, is_open=generates)
        except TEMPLATE_ERRORS as error:
            raise ConfigError(f"the chat template refuses the messages: {error}") from error
        self._check_length(ids)
        return ids

    def _check_length(self, ids: list[int]) -> None:
        if len(ids) > self._max_prompt_tokens:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, more than "
                f"reward.reward_model.rollout.prompt_length={self._max_prompt_tokens}"
            )

    def _seed_of(self, request: Mapping[str, Any]) -> int:
        seed = request.get("seed")
        if seed is not None:
            return int(seed)
        text = json.dumps(request, sort_keys=True)
        return sampling_seed(self._seed, hashlib.sha256(text.encode()).hexdigest(), 0, 0)

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"reward-{self._num_requests}"


def _check_options(request: Mapping[str, Any]) -> None:
    wrong = [
        name
        for name, value in request.items()
        if name not in CHAT_OPTIONS and value not in NEUTRAL_OPTIONS.get(name, ())
    ]
    if wrong:
        raise ConfigError(
            f"{', '.join(sorted(wrong))} cannot be set; there are {', '.join(sorted(CHAT_OPTIONS))}"
        )


async def _healthy(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})
