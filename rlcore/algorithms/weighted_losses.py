"""Policy losses without PPO's minimum: CISPO, SAPO, REINFORCE.

Legend: B rows (trajectories), T response positions, r = exp(logp - old_logp). Gradient flows to
`logp` only.

| function | loss per token | paper |
|---|---|---|
| cispo_loss | -stopgrad(clamp(r, min, max)) A logp | MiniMax-M1, https://arxiv.org/abs/2506.13585 |
| sapo_loss | -A (4 / tau) sigmoid(tau (r - 1)) | https://arxiv.org/abs/2511.20347 |
| reinforce_loss | -A logp | also the loss of GPG |

Differences: CISPO's bounds are ratios (as in TRL; verl and slime say 1 + eps), and a clipped token
keeps its gradient. SAPO's gate has slope 1 at r = 1 for any tau.
"""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.masked import constant, select
from rlcore.algorithms.ratio import probability_ratio, weighted


def cispo_loss(  # noqa: PLR0913 - the normative signature of this loss
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    ratio_min: float | None = None,
    ratio_max: float = 5.0,
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the REINFORCE loss weighted by the clamped, constant ratio.

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        ratio_min: smallest weight; None = 0.
        ratio_max: largest weight.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token.

    Raises:
        ValueError: `agg` is unknown.
    """
    ratio = probability_ratio(old_logp, logp.detach(), mask).clamp(ratio_min, ratio_max)
    losses = weighted(reinforce_terms(logp, adv, mask), is_weights, mask)
    return agg_loss(ratio * losses, mask, agg, **(agg_kw or {}))


def sapo_loss(  # noqa: PLR0913 - the normative signature of this loss
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    agg: AggMode = "seq-mean-token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the loss with a soft gate in the place of the clip.

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        tau_pos: how sharply the gate closes where A > 0.
        tau_neg: how sharply it closes elsewhere.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token.

    Raises:
        ValueError: `agg` is unknown.
    """
    ratio, advantage = probability_ratio(old_logp, logp, mask), constant(adv, mask)
    positive = torch.sigmoid(tau_pos * (ratio - 1)) * (4 / tau_pos)
    other = torch.sigmoid(tau_neg * (ratio - 1)) * (4 / tau_neg)
    losses = -advantage * torch.where(advantage > 0, positive, other)
    return agg_loss(weighted(losses, is_weights, mask), mask, agg, **(agg_kw or {}))


def reinforce_loss(
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the plain policy-gradient loss -A logp, aggregated.

    Args:
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token.

    Raises:
        ValueError: `agg` is unknown.
    """
    losses = weighted(reinforce_terms(logp, adv, mask), is_weights, mask)
    return agg_loss(losses, mask, agg, **(agg_kw or {}))


def reinforce_terms(
    logp: Float[Tensor, "B T"], adv: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return -A logp per token."""
    return -constant(adv, mask) * select(logp, mask)
