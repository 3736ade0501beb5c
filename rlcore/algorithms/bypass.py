"""Corrections that compare with the weights being trained, and so happen in the loss.

Legend: B rows (trajectories), T response positions.

Bypass mode (verl's name): the engine's log-probs stand for the old ones, two policies instead of
three, one forward pass less. Either PPO's ratio is taken against the sampler and no weight comes
on top, or the plain policy gradient is weighted by current / sampler, which is constant.

A token that is dropped here has advantage 0 and stays in the divisors, which count the original
mask: the totals of an optimizer step are known before its first forward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.losses import (
    LossAndMetrics,
    PolicyLossInputs,
    policy_gradient,
    register_policy_loss,
    vanilla,
)
from rlcore.algorithms.masked import select
from rlcore.algorithms.rollout_correction import (
    off_policy_sequence_mask,
    rejection_mask,
    rollout_is_weights,
)

BypassLoss = Literal["ppo_clip", "reinforce"]


def drop_rejected(
    inputs: PolicyLossInputs, rejections: Sequence[Mapping[str, Any]]
) -> PolicyLossInputs:
    """Return the inputs with advantage 0 where one of the `rejection_mask`s drops the token.

    Args:
        inputs: old_logp is the engine's.
        rejections: arguments of one `rejection_mask` each.

    Raises:
        ValueError: a valid log-prob is not finite, or an argument is not fit.
    """
    kept = inputs.mask
    for arguments in rejections:
        one = rejection_mask(inputs.logp.detach(), inputs.old_logp, inputs.mask, **arguments)
        kept = kept * one.bool()
    return replace(inputs, adv=select(inputs.adv, kept)) if rejections else inputs


def drop_drifted(inputs: PolicyLossInputs, delta: float) -> PolicyLossInputs:
    """Return the inputs with advantage 0 where `off_policy_sequence_mask` drops the token.

    Raises:
        ValueError: a valid number is not finite.
    """
    logp, adv = inputs.logp.detach(), inputs.adv
    kept = off_policy_sequence_mask(inputs.old_logp, logp, adv, inputs.mask, delta)
    return replace(inputs, adv=select(adv, kept))


@register_policy_loss(
    "bypass_mode",
    reads=("loss_type", "weights", "clip_low", "clip_high", "dual_clip", "agg"),
    takes_weights=False,
    is_silent_without_advantage=True,
)
def bypass_mode(
    inputs: PolicyLossInputs,
    loss_type: BypassLoss = "ppo_clip",
    weights: Mapping[str, Any] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **aggregation: Any,
) -> LossAndMetrics:
    """Return PPO's clipped loss or the weighted policy gradient against the sampler.

    Args:
        inputs: old_logp is the engine's.
        loss_type: which of the two.
        weights: arguments of `rollout_is_weights` for "reinforce"; None = no weights.
        clip_low: of "ppo_clip", as in `ppo_loss`.
        clip_high: likewise.
        dual_clip: likewise.
        **aggregation: agg and agg_kw.

    Raises:
        ValueError: weights with "ppo_clip", whose ratio is that weight; weights normalised over the
            batch, of which a loss sees a part only; an unknown name.
    """
    check_choice("loss_type", loss_type, get_args(BypassLoss))
    if loss_type == "ppo_clip":
        if weights is not None:
            raise ValueError("ppo_clip has the ratio to the sampler; weights would count it twice")
        return vanilla(inputs, clip_low, clip_high, dual_clip, **aggregation)
    if weights is not None:
        if weights.get("batch_normalize"):
            raise ValueError("a loss sees one micro-batch: it cannot normalise over the batch")
        logp, old = inputs.logp.detach(), inputs.old_logp
        inputs = replace(inputs, is_weights=rollout_is_weights(logp, old, inputs.mask, **weights))
    return policy_gradient(inputs, **aggregation)
