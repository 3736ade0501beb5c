"""Sampling of one token per slot: what a request may ask for, random numbers, inverse CDF.

Legend: S slots, V vocabulary. A request's random numbers depend on its seed and on the position of
the token in its turn only, never on other requests or on when it runs: number `position` of stream
`seed` is a hash of the two (the finaliser of SplitMix64, applied twice), computed for all slots at
once. Every operation on logits works row by row, so a row's token and log-prob do not depend on the
other rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.errors import ConfigError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 256
"""Probabilities are summed in blocks of this size: one pass over V instead of a running sum."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, None),
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
    seed: int = 0
    """Stream of random numbers, an unsigned 64-bit integer."""
    position: int = 0
    """The last tokens of the prompt that this turn has sampled already: a resumed request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the model's own EOS; they belong to it."""
    ignore_eos: bool = False
    """Do not stop at the model's EOS (measurements of equal length)."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Check what a client asks for.

        A temperature of 0 means the most likely token, as in vLLM; its log-probs are those of the
        unscaled distribution.

        Raises:
            ConfigError: a value is out of range, unknown, or asks for what this engine cannot do.
        """
        problems = _problems_of(values)
        if problems:
            raise ConfigError("sampling_params: " + "; ".join(problems))
        temperature = float(values.get("temperature", 1.0))
        return cls(
            max_tokens=int(values["max_tokens"]),
            temperature=temperature or 1.0,
            do_sample=bool(values.get("do_sample", True)) and temperature > 0,
            seed=int(values.get("seed", 0)),
            position=int(values.get("position", 0)),
            stop_token_ids=tuple(int(i) for i in values.get("stop_token_ids") or ()),
            ignore_eos=bool(values.get("ignore_eos", False)),
        )


def _problems_of(values: Mapping[str, Any]) -> list[str]:
    known = set(SamplingParams.__dataclass_fields__)
    problems = [
        f"{name}={values[name]!r} is not supported by the transformers engine; leave it out"
        for name, neutral in _NEUTRAL.items()
        if name in values and values[name] not in neutral
    ]
    unknown = sorted(set(values) - known - set(_NEUTRAL))
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    temperature = float(values.get("temperature", 1.0))
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature is {temperature}, must be a finite number from 0 on")
    if int(values.get("max_tokens", 0)) < 1:
        problems.append(f"max_tokens is {values.get('max_tokens')}, must be at least 1")
    if int(values.get("position", 0)) < 0:
        problems.append(f"position is {values['position']}, must be at least 0")
    if not 0 <= int(values.get("seed", 0)) < 2**64:
        problems.append(f"seed is {values['seed']}, must be an unsigned 64-bit integer")
    elif "seed" not in values and values.get("do_sample", True) and temperature > 0:
        problems.append("seed is missing: every sampled request needs its own")
    return problems


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return number `positions[i]` of stream `seeds[i]`, in [0, 1).

    The seed is mixed before the position joins it: streams of neighbouring seeds share no numbers.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(_mix(counter)) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


class SlotSampler:
    """Chooses a token for each of S rows of logits; reuses its buffers.

    Fresh pages for [S, V] float32 numbers cost several times what the arithmetic does.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        num_blocks = -(-vocab_size // _BLOCK)
        self._vocab_size = vocab_size
        # The columns past V stay at zero probability.
        self._padded = torch.zeros(num_slots, num_blocks * _BLOCK, dtype=torch.float32)
        self._rows = torch.arange(num_slots)

    def sample(
        self,
        logits: Tensor,
        temperature: npt.NDArray[np.float32],
        do_sample: npt.NDArray[np.bool_],
        uniforms: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return token and log-prob per row.

        Args:
            logits: [S, V], any floating point type.
            temperature: [S], above 0.
            do_sample: [S], False: the most likely token.
            uniforms: [S], in [0, 1).
        """
        scores = self._padded[:, : self._vocab_size]
        scores.copy_(logits)
        if np.any(temperature != 1.0):
            scores.div_(torch.from_numpy(temperature)[:, None])
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        best = None if do_sample.all() else scores.argmax(dim=-1)
        weights = scores.exp_()
        sums = self._padded.view(len(self._rows), -1, _BLOCK).sum(dim=-1)
        cumulative = sums.double().cumsum(dim=-1)
        tokens = self._inverse_cdf(cumulative, torch.from_numpy(uniforms))
        if best is not None:
            tokens = torch.where(torch.from_numpy(do_sample), tokens, best)
        chosen = weights[self._rows, tokens].double()
        log_probs = (chosen / cumulative[:, -1]).log_().float()
        return tokens.numpy(), log_probs.numpy()

    def _inverse_cdf(self, cumulative: Tensor, uniforms: Tensor) -> Tensor:
        """First token whose cumulative probability exceeds the uniform number: block, then place.

        Both searches look for the first sum strictly above a target strictly below the total, so a
        token of zero probability is never chosen, whatever the rounding of the sums.
        """
        target = uniforms * cumulative[:, -1]
        target = torch.minimum(target, _just_below(cumulative[:, -1]))
        block = (cumulative <= target[:, None]).sum(dim=-1)
        before = torch.where(
            block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0], 0.0
        )
        inside = self._padded.view(len(self._rows), -1, _BLOCK)[self._rows, block]
        inside = inside.double().cumsum(dim=-1)
        rest = torch.minimum(target - before, _just_below(inside[:, -1]))
        return block * _BLOCK + (inside <= rest[:, None]).sum(dim=-1)


def _just_below(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.zeros((), dtype=x.dtype))
