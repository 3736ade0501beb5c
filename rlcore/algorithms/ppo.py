"""The clipped surrogate with one ratio per token: PPO, and PPO with a separate behaviour policy.

Legend: B rows (trajectories), T response positions. Gradient flows to `logp` only.

PPO, https://arxiv.org/abs/1707.06347; clip-higher of DAPO, https://arxiv.org/abs/2503.14476; dual
clip, https://arxiv.org/abs/1912.09729. Decoupled PPO is AReaL's, https://arxiv.org/abs/2505.24298:
the clip is round the policy at the start of the step (prox), a constant weight prox / behave
corrects for the older policy that sampled.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.masked import constant
from rlcore.algorithms.ratio import clipped_surrogate, probability_ratio, weighted

CapMode = Literal["truncate", "mask"]


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

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        clip_low: how far below 1 the ratio still earns.
        clip_high: how far above 1 the ratio still earns.
        dual_clip: c > 1: where A < 0 the loss is at most -c A, with gradient 0 there; or None.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token, applied after clipping.

    Raises:
        ValueError: `dual_clip` is not above 1, or `agg` is unknown.
    """
    ratio = probability_ratio(old_logp, logp, mask)
    losses = clipped_surrogate(ratio, constant(adv, mask), clip_low, clip_high, dual_clip)
    return agg_loss(weighted(losses, is_weights, mask), mask, agg, **(agg_kw or {}))


def decoupled_ppo_loss(  # noqa: PLR0913 - the normative signature of this loss
    behave_logp: Float[Tensor, "B T"],
    prox_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float | None = None,
    cap_mode: CapMode = "truncate",
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
) -> Float[Tensor, ""]:
    """Return the clipped surrogate loss with r = pi / prox, weighted by w = prox / behave.

    Args:
        behave_logp: log-probs reported by the engine that sampled.
        prox_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        clip_low: how far below 1 the ratio still earns.
        clip_high: how far above 1 the ratio still earns.
        dual_clip: as in `ppo_loss`.
        cap: largest weight; None = unbounded.
        cap_mode: what becomes of a larger one: "truncate" makes it `cap`, "mask" 0 while the token
            stays in the divisor.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.

    Raises:
        ValueError: `dual_clip` is not above 1, or an unknown name.
    """
    check_choice("cap_mode", cap_mode, get_args(CapMode))
    weights = capped_weights(behave_logp, prox_logp, mask, cap, cap_mode)
    return ppo_loss(
        prox_logp, logp, adv, mask, clip_low, clip_high, dual_clip, agg, agg_kw, weights
    )


@torch.no_grad()
def capped_weights(
    behave_logp: Float[Tensor, "B T"],
    prox_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    cap: float | None,
    cap_mode: CapMode,
) -> Float[Tensor, "B T"]:
    """Return prox / behave per token, capped; see `decoupled_ppo_loss`."""
    weights = probability_ratio(behave_logp, prox_logp, mask)
    if cap is None:
        return weights
    largest = cap if cap_mode == "truncate" else 0.0
    return weights.masked_fill(weights > cap, largest)
