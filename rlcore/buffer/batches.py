"""What goes into the ledger and what comes out, checked and put together without changing it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rlcore.buffer.ledger_state import Lease, Partition, Prompt
from rlcore.errors import DataError
from rlcore.types import PromptSpec, SampledBatch, SessionRecord


def build_batch(lease: Lease, prompts: Sequence[Prompt]) -> SampledBatch:
    """Return the rows of the good sessions of a lease, grouped by prompt in the lease's order."""
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    for prompt in prompts:
        keys += prompt.keys
        tags += [_batch_tag(uid, session, tag) for uid, session, _, tag in _rows(prompt)]
    return SampledBatch(
        lease_id=lease.lease_id,
        global_step=lease.global_step,
        inner_step=lease.inner_step,
        uids=list(lease.uids),
        keys=keys,
        tags=tags,
        metrics={
            **lease.metrics,
            "rollout/num_prompts": float(len(lease.uids)),
            "rollout/num_trajectories": float(len(keys)),
        },
    )


def row_tags(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the tag of every row of a settled prompt as a batch would hold it, with its key."""
    return [
        {**_batch_tag(uid, session, tag), "key": key} for uid, session, key, tag in _rows(prompt)
    ]


def _rows(prompt: Prompt) -> Iterator[tuple[str, SessionRecord, str, dict[str, Any]]]:
    for session in prompt.sessions:
        if not session.is_failed:
            for key, tag in zip(session.keys, session.tags, strict=True):
                yield prompt.uid, session, key, tag


def _batch_tag(uid: str, session: SessionRecord, tag: dict[str, Any]) -> dict[str, Any]:
    return {
        **tag,
        "uid": uid,
        "session_id": session.session_id,
        "reward": session.reward,
        "reward_extra": session.reward_extra,
    }


def window_metrics(partition: Partition) -> dict[str, float]:
    """Return failures and evictions since the partition's last sampled batch (verl's names)."""
    settled = partition.window_sessions
    prefix = f"{'validation' if partition.validate else 'training'}/off_policy"
    evicted = partition.window_evicted
    spans = partition.window_stale_spans
    stale: dict[str, float] = {}
    if spans:
        # verl counts staleness, which is span - 1.
        stale = {
            "mean": sum(spans) / len(spans) - 1,
            "max": float(max(spans) - 1),
            "min": float(min(spans) - 1),
        }
    return {
        f"{prefix}/evicted_samples": float(evicted.get("stale", 0)),
        f"{prefix}/evicted_tokens": float(partition.window_stale_tokens),
        f"{prefix}/filter_groups/evicted_samples": float(evicted.get("filtered", 0)),
        f"{prefix}/filter_groups/discarded_surplus_samples": float(evicted.get("discarded", 0)),
        f"{prefix}/rollout_failure/evicted_samples": float(evicted.get("failed", 0)),
        **{f"{prefix}/evicted_samples_staleness/{kind}": value for kind, value in stale.items()},
        "rollout/settled_sessions": float(settled),
        "rollout/failed_sessions": float(partition.window_failed_sessions),
        "rollout/failed_groups": float(partition.window_failed_groups),
        "rollout/failure_ratio": partition.window_failed_sessions / settled if settled else 0.0,
    }


def check_spec(spec: PromptSpec, run_id: str) -> None:
    """Hold a prompt to the contract before it is fed.

    Raises:
        DataError: its uid, partition or number of sessions cannot be.
    """
    # Keys are taken apart at underscores by readers written for verl.
    if "_" in spec.uid or not spec.uid:
        raise DataError(f"uid {spec.uid!r} is empty or holds an underscore")
    if spec.partition_id.split("/")[0] != run_id:
        raise DataError(f"partition {spec.partition_id!r} is not one of run {run_id}")
    if spec.num_sessions < 1:
        raise DataError(f"prompt {spec.uid} has {spec.num_sessions} sessions")


def check_session(uid: str, session: SessionRecord) -> None:
    """Hold a settled session to the contract: an error, or rows with a finite reward.

    A reward that comes later is missing.

    Raises:
        DataError: it is neither.
    """
    name = f"session {session.session_id} of prompt {uid}"
    if len(session.keys) != len(session.tags):
        raise DataError(f"{name} has {len(session.keys)} keys and {len(session.tags)} tags")
    if session.is_failed:
        if session.reward is not None:
            raise DataError(f"{name} failed and has a reward ({session.reward})")
        return
    if not session.keys:
        raise DataError(f"{name} has neither rows nor an error")
    strange = [k for k in session.keys if not k.startswith(f"{uid}_{session.session_id}_")]
    if strange:
        raise DataError(f"{name} has row keys of another: {strange}")
    if session.is_unscored and session.reward is None:
        return
    if session.reward is None or not math.isfinite(session.reward):
        raise DataError(f"{name} has no finite reward: {session.reward}")
