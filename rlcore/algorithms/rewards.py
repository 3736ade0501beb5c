"""Token rewards: where a score is placed, and what is subtracted from it.

Legend: B rows (trajectories), T response positions.

`overlong_penalty` is DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476), bounded by
-factor beyond the limit (verl: unbounded). `adaptive_kl_update` is the controller of Ziegler et
al., https://arxiv.org/abs/1909.08593; their KL is a sum over the sequence, ours a mean over its
tokens, so target values do not transfer.
"""

from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.kl import KLKind, kl_estimate
from rlcore.algorithms.masked import (
    constant,
    is_nonempty,
    masked_mean,
    num_valid,
    row_mean,
    select,
    widen,
)


def place_outcome_reward(
    scores: Float[Tensor, " B"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return token rewards that hold each row's score at its last valid position, else 0.

    The last valid position, not the last attended one: a response may end in tool tokens, whose
    rewards every estimator ignores. A row without a valid token holds nothing.
    """
    valid = mask.bool()
    is_last = valid & (valid.cumsum(-1) == num_valid(mask)[:, None])
    return select(scores[:, None].expand(mask.shape), is_last)


def overlong_penalty(
    lengths: Shaped[Tensor, " B"], max_len: int, cache_len: int, factor: float = 1.0
) -> Float[Tensor, " B"]:
    """Return 0 up to max_len - cache_len tokens, falling to -factor at max_len and beyond.

    Args:
        lengths: generated tokens (mask 1) of every response, tool tokens not counted.
        max_len: tokens at which the whole penalty is due.
        cache_len: over how many tokens before that it grows; 0 makes it a step beyond max_len.
        factor: its size.

    Raises:
        ValueError: `cache_len` is not between 0 and `max_len`.
    """
    if not 0 <= cache_len <= max_len:
        raise ValueError(f"cache_len must be between 0 and max_len {max_len}, is {cache_len}")
    wide = widen(lengths) if lengths.is_floating_point() else lengths.float()
    excess = (wide - (max_len - cache_len)).clamp(min=0)
    share = excess / cache_len if cache_len else (excess > 0).to(wide.dtype)
    return -factor * share.clamp(max=1)


def subtract_kl(
    token_scores: Float[Tensor, "B T"],
    kl: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    beta: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, ""]]:
    """Return token_scores - beta * kl at valid tokens, and the mean over rows of the token mean."""
    rewards = constant(token_scores, mask) - beta * constant(kl, mask)
    return rewards, masked_mean(row_mean(kl.detach(), mask), is_nonempty(mask))


def kl_in_reward(
    token_scores: Float[Tensor, "B T"],
    old_logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    beta: float,
    kind: KLKind = "k1",
) -> tuple[Float[Tensor, "B T"], Float[Tensor, ""]]:
    """Return token rewards score - beta * KL(old || ref) per valid token, and the mean KL.

    Args:
        token_scores: rewards per token, e.g. of `place_outcome_reward`.
        old_logp: log-probs of the policy at the start of the step.
        ref_logp: log-probs of the frozen reference.
        mask: valid tokens.
        beta: coefficient of the controller.
        kind: estimator of `kl_estimate`.

    Returns:
        Rewards, 0 where the mask is 0; and the mean over non-empty rows of each row's token mean,
        the number for `adaptive_kl_update`.

    Raises:
        ValueError: unknown kind.
    """
    kl = kl_estimate(old_logp.detach(), ref_logp, mask, kind)
    return subtract_kl(token_scores, kl, mask, beta)


def adaptive_kl_update(
    value: float,
    current_kl: float | Float[Tensor, ""],
    target: float,
    horizon: float,
    n_steps: int,
) -> float:
    """Return value * (1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon).

    Args:
        value: the coefficient until now.
        current_kl: mean KL of the batch, as `kl_in_reward` returns it.
        target: KL that is aimed at.
        horizon: trajectories over which the coefficient may change by about a factor e^0.2.
        n_steps: trajectories of the batch.

    Raises:
        ValueError: `target` or `horizon` is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be above 0, are {target} and {horizon}")
    error = min(max(float(current_kl) / target - 1, -0.2), 0.2)
    return value * (1 + error * n_steps / horizon)
