"""One call to all ranks of a training group, which lives and dies together.

Ranks wait for each other inside a call. Once one has failed, the others either refuse the same call
too, or wait for something that will never come; then all are ended, so that the failure shows now
and not at a deadline. A group that has lost a rank is lost as a whole: no other try can help.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.errors import (
    ActorUnavailableError,
    DeadlineExceededError,
    RLCoreError,
    TrainingGroupLostError,
)

logger = logging.getLogger(__name__)

TOGETHER_S = 10.0
"""How long the other ranks may take to answer after one has failed."""


def call_together(
    handles: Sequence[ActorHandle], method: str, args: Sequence[Any], *, deadline_s: float
) -> Any:
    """Call a method of every rank and return rank 0's answer.

    Raises:
        TrainingGroupLostError: a rank is dead or does not answer in time; names it. All are ended.
        RLCoreError: of the rank that failed first; where others could not go on without it, all are
            ended.
    """
    try:
        return _call_all(handles, method, args, deadline_s)
    except (ActorUnavailableError, DeadlineExceededError) as error:
        if _is_raised_in_rank(error):
            raise
        for handle in handles:
            kill_actor(handle)
        raise TrainingGroupLostError(
            f"the training group is lost, all its ranks are ended: {error}"
        ) from error


def _is_raised_in_rank(error: Exception) -> bool:
    """Whether a rank lives and tells of a fault of something that it needs, the queue, say."""
    return isinstance(error.__cause__, RayTaskError)


def _call_all(
    handles: Sequence[ActorHandle], method: str, args: Sequence[Any], deadline_s: float
) -> Any:
    replies = [getattr(handle, method).remote(*args) for handle in handles]
    names = [f"trainer rank {rank}: {method}" for rank in range(len(replies))]
    if len(replies) == 1:
        return wait_for_reply(replies[0], what=names[0], deadline_s=deadline_s)
    failed = _first_failure(replies, deadline_s)
    if failed is not None:
        failed, is_overdue = _end_those_that_wait(handles, replies, failed, method)
        if is_overdue:
            raise DeadlineExceededError(f"{names[failed]} did not answer within {deadline_s:g} s")
        return wait_for_reply(replies[failed], what=names[failed], deadline_s=TOGETHER_S)
    answers = [
        wait_for_reply(reply, what=name, deadline_s=TOGETHER_S)
        for reply, name in zip(replies, names, strict=True)
    ]
    return answers[0]


def _end_those_that_wait(
    handles: Sequence[ActorHandle], replies: list[ray.ObjectRef], failed: int, method: str
) -> tuple[int, bool]:
    """Return which rank is to blame, and whether it has not answered by now.

    A dead one before those that lost their connection to it, or wait for it.
    """
    done, _ = ray.wait(replies, num_returns=len(replies), timeout=TOGETHER_S)
    dead = [rank for rank, reply in enumerate(replies) if _is_dead(reply)]
    failed = dead[0] if dead else failed
    is_overdue = replies[failed] not in done
    if len(done) == len(replies) and not dead:
        return failed, is_overdue
    logger.error(
        "trainer rank %d failed in %s: the whole group ends, since its other ranks wait for it",
        failed,
        method,
    )
    for handle in handles:
        kill_actor(handle)
    return failed, is_overdue


def _first_failure(replies: Sequence[ray.ObjectRef], deadline_s: float) -> int | None:
    """Wait until all have answered or one has failed or is overdue; return its rank, or None."""
    ends = time.monotonic() + deadline_s
    pending = list(replies)
    while pending:
        done, pending = ray.wait(pending, timeout=max(ends - time.monotonic(), 0.0))
        if not done:
            return replies.index(pending[0])
        for reply in done:
            if _error_of(reply) is not None:
                return replies.index(reply)
    return None


def _error_of(reply: ray.ObjectRef) -> Exception | None:
    """What a call that has ended raised."""
    try:
        ray.get(reply)
    except (RayError, RLCoreError) as error:
        return error
    return None


def _is_dead(reply: ray.ObjectRef) -> bool:
    done, _ = ray.wait([reply], timeout=0)
    return bool(done) and isinstance(_error_of(reply), RayActorError)
