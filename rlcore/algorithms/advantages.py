"""Advantages from one score per trajectory, relative to the group: one number per row.

Legend: B rows (trajectories), T response positions, G rows of a group, r score.

| function | advantage | paper |
|---|---|---|
| grpo | (r - mean) / (std + eps), epsilon outside the root | https://arxiv.org/abs/2402.03300 |
| dr_grpo | r - mean | https://arxiv.org/abs/2503.20783 |
| rloo | r - mean of the others = G / (G - 1) (r - mean) | https://arxiv.org/abs/2402.14740 |
| grpo_passk | best: (best - second) / (std + eps), others 0 | https://arxiv.org/abs/2503.19595 |
| opo | r - sum(L r) / sum(L) with lengths L | https://arxiv.org/abs/2505.23585 |
| gpg | alpha (r - mean) / f_norm | https://arxiv.org/abs/2504.02546 |

Differences from verl: a group of one has advantage 0 (`singleton="raw"`: its score, as there),
since it has no baseline; equal scores have exactly 0; gpg's alpha counts the rows of groups that
teach, as the paper does (`alpha_mode="nonzero_scores"`: rows with a score, as verl).

Each public function spreads what its `*_rows` computes in float64 over the valid tokens. The
original response mask belongs here: what rollout correction rejects still was an observed outcome.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.groups import (
    Labels,
    as_scores,
    labels_of,
    per_group,
    rows_by_label,
    std,
    to_tokens,
)
from rlcore.algorithms.masked import num_valid

Singleton = Literal["zero", "raw"]
StdLevel = Literal["group", "batch"]
AlphaMode = Literal["valid_groups", "nonzero_scores", "none"]


@torch.no_grad()
def grpo(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    norm_by_std: bool = True,
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "zero",
    std_level: StdLevel = "group",
) -> Float[Tensor, "B T"]:
    """Return the group-relative advantage (r - mean) / (std + eps) at every valid token.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row, compared as objects.
        mask: valid tokens.
        norm_by_std: False leaves out the division (Dr.GRPO).
        eps: added to the standard deviation.
        unbiased: Bessel's correction; False = population.
        singleton: advantage of a group of one: "zero", or "raw" (its score, as in verl).
        std_level: deviation of the group, or of all scores of the batch.

    Raises:
        ValueError: an infinite score, a wrong number of labels, or an unknown name.
    """
    labels = labels_of("group labels", groups, len(scores))
    rows = grpo_rows(as_scores(scores), labels, norm_by_std, eps, unbiased, singleton, std_level)
    return to_tokens(rows, scores, mask)


@torch.no_grad()
def dr_grpo(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    singleton: Singleton = "zero",
) -> Float[Tensor, "B T"]:
    """Return r - mean at every valid token; pair it with a constant-divisor aggregation.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row.
        mask: valid tokens.
        singleton: advantage of a group of one.

    Raises:
        ValueError: an infinite score, a wrong number of labels, or an unknown name.
    """
    labels = labels_of("group labels", groups, len(scores))
    return to_tokens(dr_grpo_rows(as_scores(scores), labels, singleton), scores, mask)


@torch.no_grad()
def rloo(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    singleton: Singleton = "zero",
) -> Float[Tensor, "B T"]:
    """Return r minus the mean of the other members at every valid token.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row.
        mask: valid tokens.
        singleton: advantage of a group of one.

    Raises:
        ValueError: an infinite score, a wrong number of labels, or an unknown name.
    """
    labels = labels_of("group labels", groups, len(scores))
    return to_tokens(rloo_rows(as_scores(scores), labels, singleton), scores, mask)


@torch.no_grad()
def grpo_passk(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "B T"]:
    """Return best - second best at the tokens of each group's best row; ties have 0.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row; at least two rows each.
        mask: valid tokens.
        norm_by_std: divide by the group's standard deviation (Bessel) + eps.
        eps: added to the standard deviation.

    Raises:
        ValueError: a group of one, an infinite score or a wrong number of labels.
    """
    labels = labels_of("group labels", groups, len(scores))
    return to_tokens(grpo_passk_rows(as_scores(scores), labels, norm_by_std, eps), scores, mask)


@torch.no_grad()
def opo(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    lengths: Shaped[Tensor, " B"] | Sequence[float] | None = None,
    singleton: Singleton = "zero",
) -> Float[Tensor, "B T"]:
    """Return r minus the length-weighted mean of the group at every valid token.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row.
        mask: valid tokens.
        lengths: weights of the baseline; None = number of valid tokens. A group whose lengths sum
            to 0 has no baseline and advantage 0.
        singleton: advantage of a group of one.

    Raises:
        ValueError: an infinite score, a negative length, a wrong number of labels or lengths, or
            an unknown name.
    """
    labels = labels_of("group labels", groups, len(scores))
    given = num_valid(mask) if lengths is None else torch.as_tensor(lengths)
    if len(given) != len(scores) or (given < 0).any():
        raise ValueError(f"lengths must be {len(scores)} numbers of at least 0, are {given}")
    weights = given.to(scores.device).double()
    return to_tokens(opo_rows(as_scores(scores), labels, weights, singleton), scores, mask)


@torch.no_grad()
def gpg(
    scores: Float[Tensor, " B"],
    groups: Labels,
    mask: Shaped[Tensor, "B T"],
    f_norm: float = 1.0,
    alpha_mode: AlphaMode = "valid_groups",
    singleton: Singleton = "zero",
) -> Float[Tensor, "B T"]:
    """Return alpha (r - mean) / f_norm at every valid token; its loss is `reinforce_loss`.

    alpha makes up for rows that teach nothing: the number of scored rows over the number of those
    in groups whose scores are not all equal ("valid_groups"), or of those with a score other than
    0 ("nonzero_scores"), or 1 ("none").

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row.
        mask: valid tokens.
        f_norm: divisor.
        alpha_mode: see above.
        singleton: advantage of a group of one.

    Raises:
        ValueError: f_norm is 0, an infinite score, a wrong number of labels, or an unknown name.
    """
    labels = labels_of("group labels", groups, len(scores))
    rows = gpg_rows(as_scores(scores), labels, f_norm, alpha_mode, singleton)
    return to_tokens(rows, scores, mask)


def grpo_rows(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    norm_by_std: bool = True,
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "zero",
    std_level: StdLevel = "group",
) -> Float[Tensor, " B"]:
    """Return GRPO's advantage of every row; see `grpo`."""
    check_choice("std_level", std_level, get_args(StdLevel))
    batch_std = std(scores[~scores.isnan()], unbiased)

    def advantage(members: Tensor, _: Tensor) -> Tensor:
        deviation = batch_std if std_level == "batch" else std(members, unbiased)
        centred = members - members.mean()
        return centred / (deviation + eps) if norm_by_std else centred

    return per_group(scores, groups, advantage, _alone(singleton, 1 + eps if norm_by_std else 1))


def dr_grpo_rows(
    scores: Float[Tensor, " B"], groups: Sequence[Hashable], singleton: Singleton = "zero"
) -> Float[Tensor, " B"]:
    """Return Dr.GRPO's advantage of every row; see `dr_grpo`."""
    return grpo_rows(scores, groups, norm_by_std=False, singleton=singleton)


def rloo_rows(
    scores: Float[Tensor, " B"], groups: Sequence[Hashable], singleton: Singleton = "zero"
) -> Float[Tensor, " B"]:
    """Return RLOO's advantage of every row; see `rloo`."""

    def advantage(members: Tensor, _: Tensor) -> Tensor:
        count = len(members)
        return (members - members.mean()) * (count / (count - 1))

    return per_group(scores, groups, advantage, _alone(singleton))


def grpo_passk_rows(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Return the pass@k advantage of every row; see `grpo_passk`."""
    singles = [label for label, rows in rows_by_label(groups).items() if len(rows) < 2]
    if singles:
        raise ValueError(f"pass@k needs two rows or more in each group; {singles[0]!r} has one")

    def advantage(members: Tensor, _: Tensor) -> Tensor:
        (best, second), (at, _) = members.topk(2)
        gap = best - second
        found = torch.zeros_like(members)
        found[at] = gap / (std(members) + eps) if norm_by_std else gap
        return found

    return per_group(scores, groups, advantage)


def opo_rows(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    lengths: Float[Tensor, " B"],
    singleton: Singleton = "zero",
) -> Float[Tensor, " B"]:
    """Return OPO's advantage of every row; see `opo`."""

    def advantage(members: Tensor, index: Tensor) -> Tensor:
        weights = lengths[index]
        total = weights.sum()
        if total == 0:
            return torch.zeros_like(members)
        return members - (weights * members).sum() / total

    return per_group(scores, groups, advantage, _alone(singleton))


def gpg_rows(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    f_norm: float = 1.0,
    alpha_mode: AlphaMode = "valid_groups",
    singleton: Singleton = "zero",
) -> Float[Tensor, " B"]:
    """Return GPG's advantage of every row; see `gpg`."""
    check_choice("alpha_mode", alpha_mode, get_args(AlphaMode))
    if f_norm == 0:
        raise ValueError("f_norm must not be 0")
    alpha = 1.0
    if alpha_mode == "valid_groups":
        teaches = per_group(scores, groups, lambda members, _: torch.ones_like(members))
        alpha = _share(scores, teaches)
    elif alpha_mode == "nonzero_scores":
        alpha = _share(scores, scores.nan_to_num())
    return dr_grpo_rows(scores, groups, singleton) * (alpha / f_norm)


def _share(scores: Tensor, counted: Tensor) -> float:
    """Number of scored rows over the number of rows where `counted` is not 0, at least 1."""
    num_scored = int((~scores.isnan()).sum())
    return num_scored / max(int((counted != 0).sum()), 1)


def _alone(singleton: Singleton, divisor: float = 1.0) -> Callable[[Tensor], Tensor] | None:
    check_choice("singleton", singleton, get_args(Singleton))
    return None if singleton == "zero" else lambda members: members / divisor
