"""On-policy distillation: a student learns from what a frozen teacher says of the student's tokens.

Legend: B rows (trajectories), T response positions, d = logp - teacher_logp.

The tokens are the student's own samples, so every estimator of kl.py estimates KL(student ||
teacher), in nats per token; the teacher's log-prob of the sampled token is all that is needed of
it. Two ways to learn from it:

| function | gradient | paper |
|---|---|---|
| distillation_loss | of the estimate itself | GKD, https://arxiv.org/abs/2306.13649 |
| distillation_pg_loss | -(estimate) is the advantage of its own token | see below |

https://thinkingmachines.ai/blog/on-policy-distillation/ is the second with k1: each token is
rewarded by log p_teacher - log p_student at once, with discount 0. Difference from GKD: the
divergence is estimated from the sampled token, not summed over the vocabulary. Differences from
verl: the advantage is of the log-probs before the update, and so one number for all optimizer
steps on a batch (verl takes the present ones; in the first optimizer step they are equal); k3 is
not cut at 10 unless `value_clamp` says so.
"""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.kl import KLKind, kl_estimate
from rlcore.algorithms.masked import masked_mean
from rlcore.algorithms.ppo import ppo_loss


def distillation_loss(
    logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    kind: KLKind = "k3",
    value_clamp: float | None = None,
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
) -> Float[Tensor, ""]:
    """Return the aggregated estimate of KL(student || teacher), differentiable in logp.

    Args:
        logp: log-probs of the student.
        teacher_logp: of the teacher, constant.
        mask: valid tokens.
        kind: estimator of `kl_estimate`.
        value_clamp: bounds the estimate on both sides, without gradient beyond; None: no bound.
        agg: mode of `agg_loss`.
        agg_kw: totals for `agg_loss`.

    Raises:
        ValueError: unknown kind or mode, or k1: its gradient does not depend on the teacher.
    """
    if kind == "k1":
        raise ValueError(
            "the gradient of k1 is 1 whatever the teacher says: take k1+, k2 or k3, or "
            "distillation_pg_loss"
        )
    values = kl_estimate(logp, teacher_logp, mask, kind, value_clamp)
    return agg_loss(values, mask, agg, **(agg_kw or {}))


def distillation_advantages(
    old_logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    kind: KLKind = "k1",
    value_clamp: float | None = None,
) -> Float[Tensor, "B T"]:
    """Return minus the estimate per token, 0 where the mask is 0, without gradient.

    Args:
        old_logp: log-probs of the student before the update.
        teacher_logp: of the teacher.
        mask: valid tokens.
        kind: estimator of `kl_estimate`; k1 gives log p_teacher - log p_student.
        value_clamp: bounds the estimate on both sides; None: no bound.

    Raises:
        ValueError: unknown kind.
    """
    return -kl_estimate(old_logp.detach(), teacher_logp, mask, kind, value_clamp)


def distillation_pg_loss(  # noqa: PLR0913 - what its two parts take
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    kind: KLKind = "k1",
    value_clamp: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
    is_weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, ""]:
    """Return PPO's clipped loss with `distillation_advantages`: one reward a token.

    Args:
        old_logp: log-probs of the student before the update, constant.
        logp: of the student now.
        teacher_logp: of the teacher, constant.
        mask: valid tokens.
        kind: see `distillation_advantages`.
        value_clamp: see `distillation_advantages`.
        clip_low: the ratio is clipped at 1 - this.
        clip_high: and at 1 + this.
        dual_clip: see `ppo_loss`.
        agg: mode of `agg_loss`.
        agg_kw: totals for `agg_loss`.
        is_weights: constant multiplier per token.

    Raises:
        ValueError: unknown kind or mode, or dual_clip not above 1.
    """
    advantages = distillation_advantages(old_logp, teacher_logp, mask, kind, value_clamp)
    return ppo_loss(
        old_logp, logp, advantages, mask, clip_low, clip_high, dual_clip, agg, agg_kw, is_weights
    )


@torch.no_grad()
def teacher_kl(
    old_logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
) -> float:
    """Return mean(old_logp - teacher_logp) over the valid tokens; 0 where there is none.

    It estimates KL(student || teacher) in nats per token without bias, where the student sampled;
    over few tokens it may be negative.
    """
    return masked_mean(kl_estimate(old_logp, teacher_logp, mask, "k1"), mask).item()
