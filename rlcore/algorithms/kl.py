"""Estimators of KL(pi || ref) from the log-probs of sampled tokens.

With d = logp - ref_logp: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (>= 0). "k1+" and
"k3+" have the value of k1 and k3 and the gradient of k2, which is d: the unbiased gradient of the
KL on-policy (http://joschu.net/blog/kl-approx.html names the estimators). Difference from verl:
`value_clamp` (verl's low_var_kl: 10) is off, since it switches the penalty off exactly where the
policy is far away.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import select

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
        kind: estimator, see the module.
        value_clamp: caps the value on both sides (gradient 0 there).

    Raises:
        ValueError: unknown kind.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(get_args(KLKind))}")
    d = select(logp, mask) - select(ref_logp, mask).detach()
    value = _value(d, kind.removesuffix("+"))
    if value_clamp is not None:
        value = value.clamp(-value_clamp, value_clamp)
    if kind.endswith("+"):
        gradient = _value(d, "k2")
        value = value.detach() + gradient - gradient.detach()
    return value


def _value(d: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d * d / 2
    return torch.exp((-d).clamp(-20.0, 20.0)) + d - 1
