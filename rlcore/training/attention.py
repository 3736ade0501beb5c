"""Attention over the packed line, as a transformers attention function.

transformers passes keyword arguments of the model's forward down to the attention function; the
blocks of `rlcore.training.layout` travel that way. Scores and softmax are float32 whatever the
autocast type (bf16 scores would cost 2-3 digits of the log-probs); the backward pass recomputes
the probabilities instead of keeping them. Against torch's masked flash kernel on CPU, whose
backward pass ignores the mask's structure, this takes a third of the time.

Legend: K tokens of the line, H query heads, N key heads, D head size; R, Q, L of a block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from rlcore.training.layout import AttentionBlock

ATTENTION_NAME = "rollflow_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 H K D"],
    key: Float[Tensor, "1 N K D"],
    value: Float[Tensor, "1 N K D"],
    attention_mask: Tensor | None,
    *,
    attention_blocks: Sequence[AttentionBlock],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 K H D"], None]:
    """Attend along the blocks of a packed line (transformers' signature).

    Raises:
        ValueError: a mask is given as well; the blocks say all.
    """
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention_mask: the blocks say who sees whom")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (x[0].transpose(0, 1).to(wide) for x in (query, key, value))
    return BlockAttention.apply(q, k, v, scale, attention_blocks)[None], None  # type: ignore[index]


class BlockAttention(torch.autograd.Function):
    """Softmax attention of each block's queries over its keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "K H D"],
        k: Float[Tensor, "K N D"],
        v: Float[Tensor, "K N D"],
        scale: float,
        blocks: Sequence[AttentionBlock],
    ) -> Float[Tensor, "K H D"]:
        """Return the attended values of every token."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        with torch.autocast(q.device.type, enabled=False):
            for block in blocks:
                rows = _gather(v, block.keys)
                attended = torch.bmm(_probabilities(q, k, scale, block), rows)
                _scatter(out, attended, block)
        ctx.save_for_backward(q, k, v, out)
        ctx.scale, ctx.blocks = scale, blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of q, k and v; probabilities are computed again."""
        q, k, v, out = ctx.saved_tensors
        grad_out = grads[0]
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)
        )
        inner = (grad_out * out).sum(-1, keepdim=True)
        for block in ctx.blocks:
            p = _probabilities(q, k, ctx.scale, block)
            num_heads = k.shape[1]
            # Padding queries repeat a real token: what arrives at them must not count.
            kept = block.is_query[:, :, None, None]
            upstream = _gather_queries(grad_out, block, num_heads, kept)
            correction = _gather_queries(inner, block, num_heads, kept)
            _add(grad_v, torch.bmm(p.transpose(1, 2), upstream), block)
            grad_scores = torch.bmm(upstream, _gather(v, block.keys).transpose(1, 2))
            grad_scores.sub_(correction).mul_(p).mul_(ctx.scale)
            _scatter(grad_q, torch.bmm(grad_scores, _gather(k, block.keys)), block)
            queries = _gather_queries(q, block, num_heads)
            _add(grad_k, torch.bmm(grad_scores.transpose(1, 2), queries), block)
        return grad_q, grad_k, grad_v, None, None


def _probabilities(q: Tensor, k: Tensor, scale: float, block: AttentionBlock) -> Tensor:
    """Softmax of the scores, [R * N, (H / N) * Q, L]."""
    (rows, num_queries), num_keys = block.queries.shape, block.keys.shape[1]
    queries = _gather_queries(q, block, k.shape[1])
    scores = torch.bmm(queries, _gather(k, block.keys).transpose(1, 2)).mul_(scale)
    by_head = scores.view(rows, -1, num_queries, num_keys)
    by_head += block.bias[:, None].to(scores.dtype)
    return torch.softmax(scores, -1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of keys or values, [R * N, L, D]."""
    rows, length = index.shape
    taken = x.index_select(0, index.flatten()).view(rows, length, *x.shape[1:])
    return taken.transpose(1, 2).reshape(-1, length, x.shape[-1])


def _gather_queries(
    x: Tensor, block: AttentionBlock, num_key_heads: int, kept: Tensor | None = None
) -> Tensor:
    """Queries with the heads that share a key head side by side, [R * N, (H / N) * Q, D]."""
    rows, length = block.queries.shape
    taken = x.index_select(0, block.queries.flatten()).view(rows, length, *x.shape[1:])
    if kept is not None:
        taken = taken * kept
    return taken.transpose(1, 2).reshape(rows * num_key_heads, -1, x.shape[-1])


def _scatter(out: Tensor, rows: Tensor, block: AttentionBlock) -> None:
    """Write the queries' results to their positions; inverse of `_gather_queries`."""
    (num_rows, length), (_, num_heads, size) = block.queries.shape, out.shape
    by_token = rows.view(num_rows, num_heads, length, size).transpose(1, 2)
    out[block.queries[block.is_query]] = by_token[block.is_query]


def _add(out: Tensor, rows: Tensor, block: AttentionBlock) -> None:
    """Add what each key of each row received to its position."""
    (num_rows, length), (_, num_heads, size) = block.keys.shape, out.shape
    by_token = rows.view(num_rows, num_heads, length, size).transpose(1, 2)
    out.index_add_(0, block.keys.flatten(), by_token.reshape(-1, num_heads, size))


AttentionInterface.register(ATTENTION_NAME, packed_attention)
