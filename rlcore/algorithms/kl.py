"""Estimators of KL(pi || ref) from the log-probs of sampled tokens.

Legend: d = logp - ref_logp.

| kind | value | gradient by logp |
|---|---|---|
| k1 | d | 1, whatever the reference: for rewards only |
| abs | abs(d) | sign(d) |
| k2 | d^2 / 2 | d |
| k3 | exp(-d) + d - 1 (>= 0) | 1 - exp(-d), biased |
| k1+, k3+ | of k1, k3 | d: the unbiased gradient of the KL on-policy |

http://joschu.net/blog/kl-approx.html names the estimators; the importance-weighted form is
DeepSeek-V3.2's, https://arxiv.org/abs/2512.02556. Difference from verl: `value_clamp` (its
low_var_kl: 10) is off, since it switches the penalty off exactly where the policy is far away.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.masked import constant, select
from rlcore.algorithms.ratio import LOG_RATIO_LIMIT, probability_ratio

KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


def kl_estimate(
    logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    kind: KLKind = "k3",
    value_clamp: float | None = None,
) -> Float[Tensor, "B T"]:
    """Return the estimate per token, 0 where the mask is 0.

    Args:
        logp: log-probs of the policy.
        ref_logp: log-probs of the reference, constant.
        mask: valid tokens.
        kind: estimator, see the module. k3 takes d as at most 20 in size.
        value_clamp: caps the value on both sides (gradient 0 there; "+" kinds keep theirs).

    Raises:
        ValueError: unknown kind.
    """
    check_choice("KL estimator", kind, get_args(KLKind))
    d = select(logp, mask) - constant(ref_logp, mask)
    value = _value(d, kind.removesuffix("+"))
    if value_clamp is not None:
        value = value.clamp(-value_clamp, value_clamp)
    if kind.endswith("+"):
        gradient = _value(d, "k2")
        value = value.detach() + gradient - gradient.detach()
    return value


def kl_importance_weighted(
    logp: Float[Tensor, "B T"],
    old_logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    kind: KLKind = "k3",
) -> Float[Tensor, "B T"]:
    """Return pi / pi_old times the estimate, per token: unbiased for samples of pi_old.

    The ratio is differentiable; where pi = pi_old the gradient of "k3" is d.

    Args:
        logp: log-probs of the policy.
        old_logp: log-probs of the policy that sampled, constant.
        ref_logp: log-probs of the reference, constant.
        mask: valid tokens.
        kind: estimator of `kl_estimate`.

    Raises:
        ValueError: unknown kind.
    """
    ratio = probability_ratio(old_logp, logp, mask)
    return select(ratio, mask) * kl_estimate(logp, ref_logp, mask, kind)


def _value(d: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d * d / 2
    bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the small values that exp(-d) - 1 + d loses to cancellation.
    return torch.expm1(-bounded) + bounded
