"""Policy losses with one ratio per sequence: GSPO and GMPO.

Legend: B rows (trajectories), T response positions, d = logp - old_logp. Gradient flows to `logp`.

GSPO (https://arxiv.org/abs/2507.18071): s = exp(mean of d over the row's valid tokens), in the
token form, where every token has the ratio s and ds / dlogp_t = s. Its clip is a thousandth of
PPO's, since s averages; it must stay with seq-mean-token-mean (verl: the trainer's default).
GMPO (https://arxiv.org/abs/2507.20673): the geometric mean of token ratios, each d bounded to
[-low, high] on the pessimistic side, so that no single token can blow it up.
"""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.masked import constant, is_nonempty, row_mean, select
from rlcore.algorithms.ratio import clipped_surrogate, log_ratio, weighted

LOG_SEQUENCE_RATIO_MAX = 10.0


def gspo_loss(  # noqa: PLR0913 - the normative signature of this loss
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    agg: AggMode = "seq-mean-token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return PPO's clipped loss with the sequence's ratio at every token.

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        clip_low: how far below 1 the ratio still earns.
        clip_high: how far above 1 the ratio still earns.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.
        is_weights: constant multiplier per token, applied after clipping.

    Raises:
        ValueError: `agg` is unknown.
    """
    ratio = sequence_ratio(old_logp, logp, mask)
    losses = clipped_surrogate(ratio, constant(adv, mask), clip_low, clip_high)
    return agg_loss(weighted(losses, is_weights, mask), mask, agg, **(agg_kw or {}))


def sequence_ratio(
    old_logp: Float[Tensor, "B T"], logp: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return GSPO's ratio s at every token, with derivative s by that token's `logp`."""
    own = select(logp, mask)
    mean = row_mean(own.detach() - constant(old_logp, mask), mask)
    # Value: the mean; gradient: as if it were this token's alone.
    log_s = own - own.detach() + mean[:, None]
    return log_s.clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()


def gmpo_loss(
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the mean over non-empty rows of -(mean A) exp(mean of the bounded d).

    Args:
        old_logp: log-probs under the weights at the start of the step.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        clip_low: bound of d below, where A < 0.
        clip_high: bound of d above, where A > 0.
        agg_kw: `dp_size` and `global_batch_size` of `agg_loss`; the rest has no effect.
        is_weights: constant multiplier of every token's advantage.
    """
    bounded = bounded_log_ratio(old_logp, logp, adv, mask, clip_low, clip_high)
    ratio = row_mean(bounded, mask).exp()
    advantage = row_mean(weighted(constant(adv, mask), is_weights, mask), mask)
    given = agg_kw or {}
    totals = {key: given[key] for key in ("dp_size", "global_batch_size") if key in given}
    rows, has_tokens = -advantage * ratio, is_nonempty(mask)
    return agg_loss(rows[:, None], has_tokens[:, None], "seq-mean-token-sum", **totals)


def bounded_log_ratio(
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "B T"]:
    """Return d where moving on would not earn more, else its bound; 0 where A = 0."""
    d = log_ratio(old_logp, logp, mask)
    sign = constant(adv, mask).sign()
    return sign * torch.minimum(sign * d, sign * d.clamp(-clip_low, clip_high))
