"""What goes into the ledger and what comes out, checked and put together without changing it."""

import math
from collections.abc import Sequence
from typing import Any

from rlcore.buffer.ledger_state import Lease, Partition, Prompt
from rlcore.errors import DataError
from rlcore.types import PromptSpec, SampledBatch, SessionRecord


def build_batch(lease: Lease, prompts: Sequence[Prompt]) -> SampledBatch:
    """Return the rows of the good sessions of a lease, grouped by prompt in the lease's order."""
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    for prompt in prompts:
        for session in prompt.sessions:
            if session.is_failed:
                continue
            keys += session.keys
            tags += [_batch_tag(prompt.uid, session, tag) for tag in session.tags]
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


def _batch_tag(uid: str, session: SessionRecord, tag: dict[str, Any]) -> dict[str, Any]:
    return {
        **tag,
        "uid": uid,
        "session_id": session.session_id,
        "reward": session.reward,
        "reward_extra": session.reward_extra,
    }


def window_metrics(partition: Partition) -> dict[str, float]:
    """Return counts and share of failed sessions since the partition's last sampled batch."""
    settled = partition.window_sessions
    return {
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
    if session.reward is None or not math.isfinite(session.reward):
        raise DataError(f"{name} has no finite reward: {session.reward}")
