"""Policy losses of one optimizer step, and their registry under verl's names.

Legend: B rows (trajectories), T response positions. Gradient flows to `logp` only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.masked import masked_mean, select
from rlcore.registry import Registry

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch."""

    old_logp: Float[Tensor, "B T"]
    logp: Float[Tensor, "B T"]
    adv: Float[Tensor, "B T"]
    mask: Shaped[Tensor, "B T"]
    is_weights: Float[Tensor, "B T"] | None = None
    """Constant multiplier per token, applied after clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossSettings:
    """Hyper-parameters of all policy losses; bounds are distances from ratio 1."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """verl's clip_ratio_c."""
    agg: AggMode = "token-mean"
    agg_kw: dict[str, Any] = field(default_factory=dict[str, Any])
    """Totals of the optimizer step and loss_scale_factor, for `agg_loss`."""


PolicyLoss = Callable[
    [PolicyLossInputs, PolicyLossSettings], tuple[Float[Tensor, ""], dict[str, float]]
]
"""Returns the loss and its metrics (means over the valid tokens of the micro-batch)."""

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")

ZERO_ADVANTAGE_IS_ZERO_GRADIENT = frozenset({"vanilla"})
"""Losses to which a trajectory without advantage adds neither value nor gradient."""


def ppo_loss(  # noqa: PLR0913 - the normative signature of this loss
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the clipped surrogate loss -min(r A, clip(r, 1 - low, 1 + high) A), aggregated.

    PPO, https://arxiv.org/abs/1707.06347; clip-higher of DAPO, https://arxiv.org/abs/2503.14476;
    dual clip, https://arxiv.org/abs/1912.09729: where A < 0 the loss is at most -c A.

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        clip_low: how far below 1 the ratio still earns.
        clip_high: how far above 1 the ratio still earns.
        dual_clip: c > 1, or None.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token.

    Raises:
        ValueError: `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, is {dual_clip}")
    ratio, advantage = _ratio(old_logp, logp, mask), select(adv, mask).detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantage, -clipped * advantage)
    if dual_clip is not None:
        capped = torch.minimum(losses, -dual_clip * advantage)
        losses = torch.where(advantage < 0, capped, losses)
    if is_weights is not None:
        losses = losses * select(is_weights, mask).detach()
    return agg_loss(losses, mask, agg, **(agg_kw or {}))


@POLICY_LOSSES.register("vanilla")
def vanilla(
    inputs: PolicyLossInputs, settings: PolicyLossSettings
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return PPO's clipped loss and verl's metrics: pg_clipfrac, pg_clipfrac_lower, ppo_kl."""
    loss = ppo_loss(
        inputs.old_logp,
        inputs.logp,
        inputs.adv,
        inputs.mask,
        **_clip_arguments(settings),
        is_weights=inputs.is_weights,
    )
    return loss, _clip_metrics(inputs, settings)


def _clip_arguments(settings: PolicyLossSettings) -> dict[str, Any]:
    return {
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
        "dual_clip": settings.dual_clip,
        "agg": settings.agg,
        "agg_kw": settings.agg_kw,
    }


@torch.no_grad()
def _clip_metrics(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> dict[str, float]:
    mask = inputs.mask
    ratio, advantage = _ratio(inputs.old_logp, inputs.logp, mask), select(inputs.adv, mask)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    is_clipped = -clipped * advantage > -ratio * advantage
    surrogate = torch.maximum(-ratio * advantage, -clipped * advantage)
    limit = settings.dual_clip
    is_capped = (
        (advantage < 0) & (surrogate > -limit * advantage)
        if limit is not None
        else torch.zeros_like(is_clipped)
    )
    log_ratio = select(inputs.logp, mask) - select(inputs.old_logp, mask)
    return {
        "pg_clipfrac": masked_mean(is_clipped.float(), mask).item(),
        "pg_clipfrac_lower": masked_mean(is_capped.float(), mask).item(),
        "ppo_kl": masked_mean(-log_ratio, mask).item(),
    }


def _ratio(old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    log_ratio = select(logp, mask) - select(old_logp, mask).detach()
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
