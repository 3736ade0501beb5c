"""The registry of policy losses under verl's names, and how the training worker calls them.

Legend: B rows (trajectories) of a micro-batch, T response positions.

Every entry is called as `loss(inputs, agg_kw=totals, **settings) -> (loss, metrics)`. `inputs` is
what a micro-batch holds, `agg_kw` the totals of the whole optimizer step for `agg_loss`, `settings`
are keyword arguments of the pure function of the same method; one that is left out has that
function's default. An entry declares what it wants (`needs`, `reads`) and what it allows
(`takes_weights`, `is_silent_without_advantage`). Metrics are means over the valid tokens.

One of your own, in a file of `trainer.user_modules`:

    @register_policy_loss("plain", reads=("agg",))
    def plain(inputs: PolicyLossInputs, agg_kw=None, agg="token-mean"):
        return reinforce_loss(inputs.logp, inputs.adv, inputs.mask, agg, agg_kw), {}
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.loss_metrics import clip_metrics, ppo_kl, share
from rlcore.algorithms.ppo import decoupled_ppo_loss, ppo_loss
from rlcore.algorithms.ratio import log_ratio, probability_ratio
from rlcore.algorithms.sequence_losses import (
    bounded_log_ratio,
    gmpo_loss,
    gspo_loss,
    sequence_ratio,
)
from rlcore.algorithms.weighted_losses import cispo_loss, reinforce_loss, sapo_loss
from rlcore.registry import Registry

LossAndMetrics = tuple[Float[Tensor, ""], dict[str, float]]

AggKw = dict[str, Any] | None

Need = Literal["old_logp", "rollout_logp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch."""

    old_logp: Float[Tensor, "B T"]
    """Under the weights at the start of the step; in bypass mode the engine's."""
    logp: Float[Tensor, "B T"]
    """Under the weights being trained: gradient flows here only."""
    adv: Float[Tensor, "B T"]
    mask: Shaped[Tensor, "B T"]
    """After rejection by rollout correction."""
    is_weights: Float[Tensor, "B T"] | None = None
    """Constant multiplier per token, applied after clipping."""
    rollout_logp: Float[Tensor, "B T"] | None = None
    """From the engine at sampling (need "rollout_logp")."""


class PolicyLoss:
    """A registered policy loss: a function and what it wants.

    Attributes:
        needs: Fields of PolicyLossInputs that it uses besides logp, adv and mask.
        reads: Names of its settings.
        takes_weights: Whether importance weights may come on top; False where the loss has a weight
            for the same gap itself.
        is_silent_without_advantage: Whether a row whose advantages are all 0 adds neither value nor
            gradient, so that a trainer may leave it out of the backward pass.
    """

    def __init__(
        self,
        compute: Callable[..., LossAndMetrics],
        *,
        needs: Iterable[Need] = ("old_logp",),
        reads: Iterable[str] = (),
        takes_weights: bool = True,
        is_silent_without_advantage: bool = False,
    ) -> None:
        functools.update_wrapper(self, compute)
        self._compute = compute
        self.needs: frozenset[Need] = frozenset(needs)
        self.reads = frozenset(reads)
        self.takes_weights = takes_weights
        self.is_silent_without_advantage = is_silent_without_advantage

    def __call__(
        self, inputs: PolicyLossInputs, *, agg_kw: AggKw = None, **settings: Any
    ) -> LossAndMetrics:
        """Return the loss and its metrics.

        Raises:
            ValueError: a need is not met, weights are given that would count a gap twice, or a
                setting is not fit.
        """
        if "rollout_logp" in self.needs and inputs.rollout_logp is None:
            raise ValueError("this policy loss needs rollout_logp, which the batch lacks")
        if inputs.is_weights is not None and not self.takes_weights:
            raise ValueError(
                "this policy loss corrects for the rollout policy itself; importance weights on "
                "top would count the same gap twice"
            )
        return self._compute(inputs, agg_kw=agg_kw, **settings)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def register_policy_loss(
    *names: str,
    needs: Iterable[Need] = ("old_logp",),
    reads: Iterable[str] = (),
    takes_weights: bool = True,
    is_silent_without_advantage: bool = False,
) -> Callable[[Callable[..., LossAndMetrics]], Callable[..., LossAndMetrics]]:
    """Register a function as policy loss under one or more names (verl's decorator).

    Args:
        *names: The name and its aliases.
        needs: See PolicyLoss.
        reads: Names of the keyword arguments that the configuration gives.
        takes_weights: See PolicyLoss.
        is_silent_without_advantage: See PolicyLoss.

    Raises:
        ConfigError: a name belongs to another function.
    """
    needed, read = tuple(needs), tuple(reads)

    def add(compute: Callable[..., LossAndMetrics]) -> Callable[..., LossAndMetrics]:
        loss = PolicyLoss(
            compute,
            needs=needed,
            reads=read,
            takes_weights=takes_weights,
            is_silent_without_advantage=is_silent_without_advantage,
        )
        for name in names:
            POLICY_LOSSES.register(name)(loss)
        return compute

    return add


def _terms(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.old_logp, inputs.logp, inputs.adv, inputs.mask


def _kl(inputs: PolicyLossInputs) -> dict[str, float]:
    return {"ppo_kl": ppo_kl(inputs.old_logp, inputs.logp, inputs.mask)}


@register_policy_loss(
    "vanilla",
    reads=("clip_low", "clip_high", "dual_clip", "agg"),
    is_silent_without_advantage=True,
)
def vanilla(
    inputs: PolicyLossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **aggregation: Any,
) -> LossAndMetrics:
    """Return `ppo_loss` and its metrics."""
    bounds = (clip_low, clip_high, dual_clip)
    loss = ppo_loss(*_terms(inputs), *bounds, **aggregation, is_weights=inputs.is_weights)
    ratio = probability_ratio(inputs.old_logp, inputs.logp.detach(), inputs.mask)
    return loss, clip_metrics(ratio, inputs.adv, inputs.mask, *bounds) | _kl(inputs)


@register_policy_loss(
    "decoupled_ppo",
    needs=("old_logp", "rollout_logp"),
    reads=("clip_low", "clip_high", "dual_clip", "cap", "cap_mode", "agg"),
    takes_weights=False,
    is_silent_without_advantage=True,
)
def _decoupled_ppo(
    inputs: PolicyLossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **settings: Any,
) -> LossAndMetrics:
    assert inputs.rollout_logp is not None
    bounds = (clip_low, clip_high, dual_clip)
    loss = decoupled_ppo_loss(inputs.rollout_logp, *_terms(inputs), *bounds, **settings)
    ratio = probability_ratio(inputs.old_logp, inputs.logp.detach(), inputs.mask)
    return loss, clip_metrics(ratio, inputs.adv, inputs.mask, *bounds) | _kl(inputs)


@register_policy_loss(
    "gspo", reads=("clip_low", "clip_high", "agg"), is_silent_without_advantage=True
)
def _gspo(
    inputs: PolicyLossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, **aggregation: Any
) -> LossAndMetrics:
    bounds = (clip_low, clip_high)
    loss = gspo_loss(*_terms(inputs), *bounds, **aggregation, is_weights=inputs.is_weights)
    ratio = sequence_ratio(inputs.old_logp, inputs.logp.detach(), inputs.mask)
    return loss, clip_metrics(ratio, inputs.adv, inputs.mask, *bounds) | _kl(inputs)


@register_policy_loss(
    "geo_mean", "gmpo", reads=("clip_low", "clip_high"), is_silent_without_advantage=True
)
def _gmpo(
    inputs: PolicyLossInputs, clip_low: float = 0.4, clip_high: float = 0.4, agg_kw: AggKw = None
) -> LossAndMetrics:
    bounds = (clip_low, clip_high)
    loss = gmpo_loss(*_terms(inputs), *bounds, agg_kw=agg_kw, is_weights=inputs.is_weights)
    with torch.no_grad():
        d = log_ratio(inputs.old_logp, inputs.logp, inputs.mask)
        is_bounded = bounded_log_ratio(*_terms(inputs), *bounds) != d
        clipped = share(is_bounded & (inputs.adv != 0), inputs.mask)
    return loss, {"pg_clipfrac": clipped} | _kl(inputs)


@register_policy_loss(
    "cispo", reads=("ratio_min", "ratio_max", "agg"), is_silent_without_advantage=True
)
def _cispo(
    inputs: PolicyLossInputs,
    ratio_min: float | None = None,
    ratio_max: float = 5.0,
    **aggregation: Any,
) -> LossAndMetrics:
    bounds = (ratio_min, ratio_max)
    loss = cispo_loss(*_terms(inputs), *bounds, **aggregation, is_weights=inputs.is_weights)
    ratio = probability_ratio(inputs.old_logp, inputs.logp.detach(), inputs.mask)
    clipped = share(ratio.clamp(*bounds) != ratio, inputs.mask)
    return loss, {"pg_clipfrac": clipped} | _kl(inputs)


@register_policy_loss("sapo", reads=("tau_pos", "tau_neg", "agg"), is_silent_without_advantage=True)
def _sapo(inputs: PolicyLossInputs, **settings: Any) -> LossAndMetrics:
    loss = sapo_loss(*_terms(inputs), **settings, is_weights=inputs.is_weights)
    return loss, _kl(inputs)


@register_policy_loss("gpg", "reinforce", reads=("agg",), is_silent_without_advantage=True)
def policy_gradient(inputs: PolicyLossInputs, **aggregation: Any) -> LossAndMetrics:
    """Return `reinforce_loss` and its metrics."""
    loss = reinforce_loss(
        inputs.logp, inputs.adv, inputs.mask, **aggregation, is_weights=inputs.is_weights
    )
    return loss, _kl(inputs)
