"""Log-probs and entropy from logits.

Legend: V vocabulary. The temperature divides logits, never log-probs.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_logp(
    logits: Float[Tensor, "*n V"], ids: Int[Tensor, "*n"], temperature: float = 1.0
) -> Float[Tensor, "*n"]:
    """Return log_softmax(logits / temperature) at `ids`, nats."""
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_entropy(logits: Float[Tensor, "*n V"], temperature: float = 1.0) -> Float[Tensor, "*n"]:
    """Return the entropy of softmax(logits / temperature), nats."""
    logp = torch.log_softmax(_scaled(logits, temperature), -1)
    # xlogy-like: where the probability underflows to 0 the term is 0, also with logp = -inf.
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return wide / temperature
