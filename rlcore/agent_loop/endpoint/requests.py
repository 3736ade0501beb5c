"""What may be asked: the options of OpenAI's chat completions and completions that are honoured.

Options that ask for what happens anyway are accepted; all others are refused by name. How tokens
are sampled is the run's business, since the trainer computes log-probs for that: what a request
asks for there is read, and answered with the run's.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlcore.json_http import RequestError

MODEL = "policy"
"""Name of the model that is trained; requests may use any."""

Zero = Annotated[float, Field(ge=0, le=0)] | None
One = Annotated[float, Field(ge=1, le=1)] | None
Words = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Function(BaseModel):
    """A tool's function."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str


class Tool(BaseModel):
    """A tool as OpenAI describes it; templates get all that its client says."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"] = "function"
    function: Function


class StreamOptions(_Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    """End with a chunk that counts tokens."""
    include_obfuscation: Literal[False, None] = None
    """Padding against listeners."""


class Options(_Body, ABC):
    """What both kinds of requests may ask for."""

    model: str = MODEL
    """Any name: the answer repeats it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """New tokens at most; null: what is left of the response."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The same under OpenAI's newer name, which goes before."""
    stop: Words | list[Words] | None = None
    """Texts that end the response; the answer leaves them out, the trajectory has them."""
    stream: bool | None = None
    """Send the text as it is sampled."""
    stream_options: StreamOptions | None = None
    """See there."""
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and `token_ids` to the answer (vLLM's option)."""

    temperature: float | None = None
    """The run's is used."""
    top_p: float | None = None
    """The run's is used."""
    top_k: int | None = None
    """The run's is used (vLLM's option)."""
    seed: int | None = None
    """The session's is used."""

    n: Literal[1, None] = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    repetition_penalty: One = None
    min_p: Zero = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: Any = None
    """Names a person or purpose: has no effect on the answer."""
    metadata: Any = None
    """As `user`."""
    safety_identifier: Any = None
    """As `user`."""
    prompt_cache_key: Any = None
    """As `user`."""
    service_tier: Literal["auto", "default", None] = None
    store: Literal[False, None] = None

    @property
    def wanted_tokens(self) -> int | None:
        """New tokens at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts that end the response."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream counts tokens at its end."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    @abstractmethod
    def has_logprobs(self) -> bool:
        """Whether the answer has the log-prob of each sampled token."""

    def sampling(self) -> dict[str, Any]:
        """Return what is asked for and answered with the run's."""
        asked = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return {name: value for name, value in asked.items() if value is not None}

    @model_validator(mode="after")
    def stream_options_need_a_stream(self) -> Self:
        """OpenAI refuses the one without the other, too."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true")
        return self


class ChatRequest(Options):
    """A request for the next message of a conversation."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The conversation so far."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none", None] = None
    """`none`: the answer is text, whatever it looks like."""
    parallel_tool_calls: Literal[True, None] = None
    logprobs: bool | None = None
    """The log-prob of each sampled token."""
    top_logprobs: Literal[0, None] = None
    response_format: dict[str, Any] | None = None
    """Of type text."""
    modalities: list[Literal["text"]] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has the log-prob of each sampled token."""
        return bool(self.logprobs)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]

    @property
    def may_call(self) -> bool:
        """Whether calls in the model's text are looked for."""
        return bool(self.tools) and self.tool_choice != "none"

    @field_validator("response_format")
    @classmethod
    def response_format_is_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Nothing forces the model into a form."""
        if value is not None and value.get("type") != "text":
            raise ValueError("only {type: text} is there")
        return value


class CompletionRequest(Options):
    """A request to go on with a text."""

    prompt: Words | Annotated[list[int], Field(min_length=1)]
    """A text or a list of token ids; or a list of one such."""
    logprobs: Literal[0, None] = None
    """0: the log-prob of each sampled token."""
    echo: Literal[False, None] = None
    suffix: Literal["", None] = None
    best_of: Literal[1, None] = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has the log-prob of each sampled token."""
        return self.logprobs is not None

    @field_validator("prompt", mode="before")
    @classmethod
    def prompt_is_one(cls, prompt: Any) -> Any:
        """Several would need several choices."""
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return prompt
        if len(prompt) > 1:
            raise ValueError("holds several prompts: send a request for each")
        return prompt[0]


Request = TypeVar("Request", bound=Options)


def read_request(kind: type[Request], body: Mapping[str, Any]) -> Request:
    """Return what a body asks for.

    Raises:
        RequestError: an option is unknown or asks for what is not there; names all of them.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = [(".".join(map(str, found["loc"])), found) for found in error.errors()]
        unknown = sorted({name for name, found in problems if found["type"] == "extra_forbidden"})
        texts = [f"unknown options: {', '.join(unknown)}"] if unknown else []
        texts += [
            f"{name}: {found['msg']}" if name else found["msg"]
            for name, found in problems
            if name not in unknown
        ]
        first = problems[0][1]["loc"]
        raise RequestError(
            "; ".join(texts),
            code="unknown_parameter" if unknown else "invalid_value",
            param=str(first[0]) if first else None,
        ) from error
