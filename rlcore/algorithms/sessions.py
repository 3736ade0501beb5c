"""Several stored outputs (rows) of one session of a prompt, and which prompts teach anything.

Legend: B rows (trajectories), T response positions. A prompt (uid) has several sessions, a session
one or several rows; row order is arbitrary and failed sessions simply do not exist.

A session counts once in the statistics of its prompt, by the score of its output of the highest
index, and all its rows share the advantage. With a seq-mean aggregation a session of k rows has
weight k: `session_weights` undoes that. `dynamic_sampling_keep` is DAPO's filter,
https://arxiv.org/abs/2503.14476.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlcore.algorithms.advantages import (
    dr_grpo_rows,
    gpg_rows,
    grpo_passk_rows,
    grpo_rows,
    rloo_rows,
)
from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.groups import (
    Labels,
    as_scores,
    labels_of,
    per_group,
    rows_by_label,
    to_tokens,
)
from rlcore.algorithms.masked import is_nonempty, spread

SessionEstimator = Literal["grpo", "dr_grpo", "rloo", "grpo_passk", "gpg"]

_ROWS: dict[str, Callable[..., Float[Tensor, " S"]]] = {
    "grpo": grpo_rows,
    "dr_grpo": dr_grpo_rows,
    "rloo": rloo_rows,
    "grpo_passk": grpo_passk_rows,
    "gpg": gpg_rows,
}


@torch.no_grad()
def multi_trajectory(
    scores: Float[Tensor, " B"],
    uids: Labels,
    sessions: Labels,
    out_index: Sequence[int] | Int[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    estimator: SessionEstimator = "grpo",
    **kw: Any,
) -> Float[Tensor, "B T"]:
    """Return the advantage of every row's session at the row's valid tokens.

    Args:
        scores: one per row; only that of a session's last output counts. NaN = unscorable.
        uids: prompt of every row.
        sessions: session of every row; sessions of different prompts may have the same label.
        out_index: number of the output within its session; the last one counts, also when nothing
            of it is trained on.
        mask: valid tokens.
        estimator: how sessions of a prompt are compared.
        **kw: Further arguments of that estimator.

    Raises:
        ValueError: two outputs of a session with one index, an infinite score, a wrong number of
            labels, or an unknown name.
    """
    check_choice("estimator", estimator, get_args(SessionEstimator))
    last, owner = last_outputs(uids, sessions, out_index, len(scores))
    prompts = labels_of("uids", uids, len(scores))
    counted = as_scores(scores[last.to(scores.device)])
    advantages = _ROWS[estimator](counted, [prompts[int(row)] for row in last], **kw)
    return to_tokens(advantages[owner.to(scores.device)], scores, mask)


def last_outputs(
    uids: Labels, sessions: Labels, out_index: Sequence[int] | Int[Tensor, " B"], count: int
) -> tuple[Int[Tensor, " S"], Int[Tensor, " B"]]:
    """Return the row of each session's last output, and the session (0 .. S - 1) of every row.

    Raises:
        ValueError: two outputs of a session with one index, or a wrong number of labels.
    """
    rows = _rows_by_session(uids, sessions, count)
    indices = [int(index) for index in out_index]
    if len(indices) != count:
        raise ValueError(f"{len(indices)} output indices for {count} rows")
    last: list[int] = []
    owner = torch.zeros(count, dtype=torch.long)
    for session, ((uid, name), members) in enumerate(rows.items()):
        numbers = [indices[row] for row in members]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"session {name!r} of prompt {uid!r} has output indices {numbers}")
        last.append(members[numbers.index(max(numbers))])
        owner[members] = session
    return torch.tensor(last, dtype=torch.long), owner


@torch.no_grad()
def session_weights(
    uids: Labels, sessions: Labels, mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return weights per token with which seq-mean losses give every session the same weight.

    A row of a session of which k rows are non-empty has (non-empty rows / non-empty sessions) / k:
    the weights of the batch's non-empty rows average to 1, so that the divisor need not change.
    Pass them on as `is_weights`.

    Args:
        uids: prompt of every row.
        sessions: session of every row.
        mask: valid tokens.

    Raises:
        ValueError: a wrong number of labels.
    """
    trained = [bool(row) for row in is_nonempty(mask)]
    weights = torch.zeros(len(mask), device=mask.device)
    found = _rows_by_session(uids, sessions, len(mask)).values()
    members = [kept for rows in found if (kept := [row for row in rows if trained[row]])]
    for rows in members:
        weights[rows] = sum(trained) / len(members) / len(rows)
    return spread(weights, mask)


def dynamic_sampling_keep(scores: Float[Tensor, " B"], groups: Labels) -> Bool[Tensor, " B"]:
    """Return True for every row of a group whose scores are not all equal.

    Give it the raw metric (accuracy), never a reward shaped by length: a group in which all are
    wrong would survive by its length penalties. Groups of one are dropped. What is dropped must be
    refilled to the batch size.

    Args:
        scores: one per trajectory; NaN = unscorable, not compared.
        groups: label per row.

    Raises:
        ValueError: an infinite score, or a wrong number of labels.
    """
    labels = labels_of("group labels", groups, len(scores))
    teaches = per_group(as_scores(scores), labels, lambda members, _: torch.ones_like(members))
    kept = {label for label, value in zip(labels, teaches, strict=True) if value}
    return torch.tensor([label in kept for label in labels], dtype=torch.bool, device=scores.device)


def _rows_by_session(
    uids: Labels, sessions: Labels, count: int
) -> dict[tuple[Hashable, Hashable], list[int]]:
    prompts, names = labels_of("uids", uids, count), labels_of("sessions", sessions, count)
    found = rows_by_label(list(zip(prompts, names, strict=True)))
    return {(prompts[rows[0]], names[rows[0]]): rows for rows in found.values()}
