"""Log-probs of response tokens straight from hidden states, never holding [tokens, vocabulary].

The output projection runs over slices of the vocabulary; per slice the log-sum-exp, the chosen
logit and the mean logit are kept. The backward pass computes each slice's logits again. Compared
with logits -> float32 -> log_softmax this saves several passes over fresh memory of 4 bytes x
tokens x vocabulary (200 MB for 64 x 16 tokens of SmolLM2), at the price of one more projection.

Legend: M response tokens, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

SLICE_ELEMENTS = 1 << 21
"""Logits of one slice: 8 MiB as float32, which stays in cache."""

MIN_SLICE_WIDTH = 256
"""Below this the matrix products are too small to be fast."""


def linear_logp_entropy(
    hidden: Float[Tensor, "M E"],
    weight: Float[Tensor, "V E"],
    ids: Int[Tensor, " M"],
    temperature: float,
    *,
    slice_elements: int = SLICE_ELEMENTS,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Return log_softmax(hidden weight^T / temperature) at `ids` and the entropy, in nats.

    Equal to `token_logp` and `token_entropy` of the logits. The projection runs in the autocast
    type if autocast is on, all that follows in at least float32.
    """
    device = hidden.device.type
    on = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if on else weight.dtype
    width = max(slice_elements // max(len(ids), 1), MIN_SLICE_WIDTH)
    return _LinearLogp.apply(hidden, weight, ids, temperature, dtype, width)  # type: ignore[return-value]


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        dtype: torch.dtype,
        width: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        narrow = hidden.to(dtype)
        chosen = hidden.new_zeros(len(ids), dtype=wide)
        log_sums: list[Tensor] = []
        means: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for start, stop in _slices(len(weight), width):
                logits = _logits(narrow, weight[start:stop], temperature, wide)
                log_sums.append(logits.logsumexp(-1))
                is_here = (ids >= start) & (ids < stop)
                local = (ids - start).clamp(0, stop - start - 1)[:, None]
                chosen += torch.where(is_here, logits.gather(-1, local)[:, 0], 0.0)
                p = (logits - log_sums[-1][:, None]).exp_()
                means.append(torch.linalg.vecdot(p, logits))
        by_slice = torch.stack(log_sums, -1)
        log_sum = by_slice.logsumexp(-1)
        mean = ((by_slice - log_sum[:, None]).exp() * torch.stack(means, -1)).sum(-1)
        entropy = log_sum - mean
        ctx.save_for_backward(narrow, weight, ids, log_sum, mean)
        ctx.temperature, ctx.wide, ctx.width = temperature, wide, width
        ctx.hidden_dtype = hidden.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None, None]:
        narrow, weight, ids, log_sum, mean = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        grad_hidden = torch.zeros_like(narrow, dtype=ctx.wide)
        grad_weight = torch.empty_like(weight)
        rows = torch.arange(len(ids), device=ids.device)
        for start, stop in _slices(len(weight), ctx.width):
            part = weight[start:stop]
            logits = _logits(narrow, part, ctx.temperature, ctx.wide)
            p = (logits - log_sum[:, None]).exp_()
            # d logp / d logits = onehot - p;  d entropy / d logits = -p (logits - mean)
            factor = torch.zeros_like(log_sum) if grad_logp is None else -grad_logp
            if grad_entropy is None:
                grad = p.mul_(factor[:, None])
            else:
                grad = p.mul_(factor[:, None] - grad_entropy[:, None] * (logits - mean[:, None]))
            if grad_logp is not None:
                is_here = (ids >= start) & (ids < stop)
                grad[rows[is_here], ids[is_here] - start] += grad_logp[is_here]
            small = grad.div_(ctx.temperature).to(narrow.dtype)
            grad_hidden += small @ part.to(narrow.dtype)
            grad_weight[start:stop] = small.t() @ narrow
        return grad_hidden.to(ctx.hidden_dtype), grad_weight, None, None, None, None


def _slices(vocabulary: int, width: int) -> list[tuple[int, int]]:
    starts = range(0, vocabulary, width)
    return [(start, min(start + width, vocabulary)) for start in starts]


def _logits(narrow: Tensor, weight: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    logits = (narrow @ weight.to(narrow.dtype).t()).to(wide)
    return logits if temperature == 1.0 else logits.div_(temperature)
