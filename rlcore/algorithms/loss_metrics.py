"""What a policy loss reports beside its value: verl's pg_clipfrac, pg_clipfrac_lower, ppo_kl.

Legend: B rows (trajectories), T response positions. All are means over the valid tokens.
"""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import constant, masked_mean, select


def share(flags: Bool[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> float:
    """Return the share of valid tokens that are flagged."""
    return masked_mean(flags.float(), mask).item()


@torch.no_grad()
def ppo_kl(
    old_logp: Float[Tensor, "B T"], logp: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> float:
    """Return mean(old_logp - logp), which estimates KL(old || current)."""
    return masked_mean(select(old_logp, mask) - select(logp, mask), mask).item()


@torch.no_grad()
def clip_metrics(
    ratio: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> dict[str, float]:
    """Return where the clipped term of the surrogate was taken, and where the dual clip was."""
    advantage = constant(adv, mask)
    plain, clipped = -ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    metrics = {"pg_clipfrac": share(clipped > plain, mask)}
    if dual_clip is not None:
        is_above = torch.maximum(plain, clipped) > -dual_clip * advantage
        metrics["pg_clipfrac_lower"] = share((advantage < 0) & is_above, mask)
    return metrics
