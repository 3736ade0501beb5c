"""Group advantages that are normalised again over the batch: GDPO and REINFORCE++-baseline.

Legend: B rows (trajectories), T response positions, K rewards, r score.

GDPO (https://arxiv.org/abs/2601.05242): each reward is normalised in its group, as GRPO does,
before the weighted sum; adding first would drown a reward of small spread. The sum is normalised
over the batch with one vote per row ("sample"), one per token ("token", as verl), or not at all.
REINFORCE++-baseline (https://arxiv.org/abs/2501.03262): r - mean of the group, whitened over all
valid tokens, so that longer rows weigh more; this is the published form.

A row whose score is NaN (GDPO: one of them) is in no statistic and has advantage 0.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.advantages import Singleton, dr_grpo, grpo_rows
from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.groups import Labels, as_scores, labels_of, to_tokens
from rlcore.algorithms.masked import is_nonempty, masked_whiten

BatchNorm = Literal["sample", "token", "none"]


@torch.no_grad()
def gdpo(  # noqa: PLR0913 - the normative signature
    score_matrix: Float[Tensor, "B K"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    weights: Sequence[float] | Float[Tensor, " K"] | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    batch_norm: BatchNorm = "sample",
    singleton: Singleton = "zero",
    batch_eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """Return the normalised weighted sum of each reward's GRPO advantage at every valid token.

    Args:
        score_matrix: K rewards per trajectory; a row with a NaN is unscorable.
        groups: label per row.
        mask: valid tokens.
        weights: of the rewards; None = 1 each.
        norm_by_std: divide each reward by the group's standard deviation (Bessel) + eps.
        eps: added to that deviation.
        batch_norm: "sample": (a - mean) / sqrt(var + batch_eps), one vote per non-empty row,
            Bessel; "token": `masked_whiten` over the valid tokens; "none".
        singleton: advantage of a group of one.
        batch_eps: added to the batch's variance, inside the root.

    Raises:
        ValueError: an infinite score, a wrong number of labels or weights, or an unknown name.
    """
    check_choice("batch_norm", batch_norm, get_args(BatchNorm))
    labels = labels_of("group labels", groups, len(score_matrix))
    rows = gdpo_rows(as_scores(score_matrix), labels, weights, norm_by_std, eps, singleton)
    scored = ~score_matrix.isnan().any(-1)
    if batch_norm == "sample":
        rows = masked_whiten(rows, scored & is_nonempty(mask), eps=batch_eps)
    trained = mask.bool() & scored[:, None]
    advantages = to_tokens(rows, score_matrix, trained)
    return (
        masked_whiten(advantages, trained, eps=batch_eps) if batch_norm == "token" else advantages
    )


@torch.no_grad()
def reinforce_pp_baseline(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    singleton: Singleton = "zero",
    whiten: bool = True,
) -> Float[Tensor, "B T"]:
    """Return r - mean of the group, whitened over all valid tokens.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row.
        mask: valid tokens.
        singleton: what a group of one brings into the whitening.
        whiten: False leaves r - mean.

    Raises:
        ValueError: an infinite score, a wrong number of labels, or an unknown name.
    """
    advantages = dr_grpo(scores, groups, mask, singleton)
    return whiten_tokens(advantages, scores, mask) if whiten else advantages


def gdpo_rows(
    scores: Float[Tensor, "B K"],
    groups: Sequence[Hashable],
    weights: Sequence[float] | Float[Tensor, " K"] | None,
    norm_by_std: bool,
    eps: float,
    singleton: Singleton,
) -> Float[Tensor, " B"]:
    """Return the weighted sum of each reward's GRPO advantage per row; see `gdpo`."""
    num_rewards = scores.shape[-1]
    given = [1.0] * num_rewards if weights is None else [float(weight) for weight in weights]
    if len(given) != num_rewards:
        raise ValueError(f"{len(given)} weights for {num_rewards} rewards")
    whole = scores.masked_fill(scores.isnan().any(-1, keepdim=True), float("nan"))
    total = torch.zeros_like(whole.sum(-1))
    for weight, column in zip(given, whole.unbind(-1), strict=True):
        total += weight * grpo_rows(column, groups, norm_by_std, eps, singleton=singleton)
    return total


def whiten_tokens(
    advantages: Float[Tensor, "B T"], scores: Float[Tensor, " B"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return the advantages whitened over the valid tokens of scored rows, 0 elsewhere."""
    return masked_whiten(advantages, mask.bool() & ~scores.isnan()[:, None])
