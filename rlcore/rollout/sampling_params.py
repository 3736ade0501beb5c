"""What a request may ask of an engine; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rlcore.errors import ConfigError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "n": (1, None),
    "logprobs": (True, False, 0, 1, None),
}
"""Settings that may be present when they change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Example:
        >>> SamplingParams.from_dict({"temperature": 1.0, "max_tokens": 16, "seed": 7}).do_sample
        True
    """

    max_tokens: int
    """New tokens at most, those of `position` not counted."""
    temperature: float = 1.0
    """Scale of the distribution that is sampled and of the log-probs."""
    do_sample: bool = True
    """Sample; otherwise the most likely token is taken."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that hold this share; log-probs are of all."""
    top_k: int = 0
    """Sample from as many most likely tokens; 0: from all."""
    seed: int = 0
    """Stream of random numbers, an unsigned 64-bit integer."""
    position: int = 0
    """The last tokens of the prompt that this turn has sampled already: a resumed request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the model's own EOS; they belong to it."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one belongs to it."""
    ignore_eos: bool = False
    """Do not stop at the model's EOS (measurements of equal length)."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Check what a client asks for.

        A temperature of 0 means the most likely token. The log-probs of tokens that are not sampled
        are those of the unscaled distribution, whatever the temperature (vLLM has no other).

        Raises:
            ConfigError: a value is out of range, unknown, or asks for what the engines cannot do.
        """
        problems = _problems_of(values)
        if problems:
            raise ConfigError("sampling_params: " + "; ".join(problems))
        temperature = float(values.get("temperature", 1.0))
        do_sample = bool(values.get("do_sample", True)) and temperature > 0
        return cls(
            max_tokens=int(values["max_tokens"]),
            temperature=temperature if do_sample else 1.0,
            do_sample=do_sample,
            top_p=_number(values, "top_p", 1.0),
            top_k=max(0, int(_number(values, "top_k", 0))),
            seed=int(values.get("seed", 0)),
            position=int(values.get("position", 0)),
            stop_token_ids=tuple(int(i) for i in values.get("stop_token_ids") or ()),
            stop=_texts(values.get("stop")),
            ignore_eos=bool(values.get("ignore_eos", False)),
        )


def _problems_of(values: Mapping[str, Any]) -> list[str]:
    known = set(SamplingParams.__dataclass_fields__)
    problems = [
        f"{name}={values[name]!r} is not supported by the engines; leave it out"
        for name, neutral in _NEUTRAL.items()
        if name in values and values[name] not in neutral
    ]
    unknown = sorted(set(values) - known - set(_NEUTRAL))
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    temperature = float(values.get("temperature", 1.0))
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature is {temperature}, must be a finite number from 0 on")
    if not 0 < _number(values, "top_p", 1.0) <= 1:
        problems.append(f"top_p is {values['top_p']}, must be above 0 and at most 1")
    if _number(values, "top_k", 0) < -1:
        problems.append(f"top_k is {values['top_k']}, must be -1 (all) or at least 1")
    if int(values.get("max_tokens", 0)) < 1:
        problems.append(f"max_tokens is {values.get('max_tokens')}, must be at least 1")
    if not all(isinstance(text, str) and text for text in _texts(values.get("stop"))):
        problems.append(f"stop is {values['stop']!r}, must be one or several texts, none empty")
    if int(values.get("position", 0)) < 0:
        problems.append(f"position is {values['position']}, must be at least 0")
    if not 0 <= int(values.get("seed", 0)) < 2**64:
        problems.append(f"seed is {values['seed']}, must be an unsigned 64-bit integer")
    elif "seed" not in values and values.get("do_sample", True) and temperature > 0:
        problems.append("seed is missing: every sampled request needs its own")
    return problems


def _texts(value: Any) -> tuple[Any, ...]:
    """Return what may be one text, several, or absent."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    """Return a setting that may be absent or None."""
    value = values.get(name)
    return default if value is None else float(value)
