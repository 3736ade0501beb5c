"""A lost training group: what is repeated, from where, how often, and when it ends the attempt."""

import asyncio
from types import SimpleNamespace

import pytest

from rlcore.errors import DataError, RankDisagreementError, TrainingGroupLostError
from rlcore.trainer.phases import BATCH_PHASES, COMMIT_STEP, SAVE_SNAPSHOT
from rlcore.types import CallKey
from tasks.retry import is_transient, retry_transient
from tasks.training_recovery import MAX_RESTARTS, TRIES, TrainingRecovery

PHASES = {phase.name: phase for phase in BATCH_PHASES}
OLD_LOG_PROBS = PHASES["compute_old_log_probs"]
VALUES, CRITIC, ACTOR = (PHASES[n] for n in ("compute_values", "update_critic", "update_actor"))
LOST = TrainingGroupLostError("trainer rank 1: update_actor: the actor's process is gone")


class Group:
    def __init__(self, events):
        self.events = events

    def load_checkpoint(self, key, folder):
        self.events.append(f"load {folder} by {key.phase}")

    def publish_weights(self, key):
        self.events.append("publish")


class Cluster:
    def __init__(self, dies_at_start=0):
        self.events = []
        self.training = Group(self.events)
        self.dies_at_start = dies_at_start

    def restart_training(self):
        self.events.append("restart")
        if self.dies_at_start:
            self.dies_at_start -= 1
            raise LOST


def make(cluster, *, steps=(0, 1, 2), is_enabled=True):
    async def redo(phase, batch, inner_step):
        cluster.events.append(f"{phase.name} {batch}.{inner_step}")

    return TrainingRecovery(
        cluster,
        saved=lambda step: (
            SimpleNamespace(actor_path=f"N{step}", path=f"N{step}") if step in steps else None
        ),
        key=lambda phase: CallKey(run_id="r", attempt=1, global_step=3, phase=phase),
        redo=redo,
        is_enabled=is_enabled,
        start_s=5,
    )


def failing(*errors):
    """Return work that raises these, one a call, and then returns 7."""
    left = list(errors)

    async def work():
        if left:
            raise left.pop(0)
        return 7

    return work


def test_the_group_goes_back_to_the_last_snapshot_and_through_what_had_changed_it():
    cluster = Cluster()
    recovery = make(cluster)
    for phase in (OLD_LOG_PROBS, ACTOR):
        recovery.note(phase, "b2", 0, 2)
    recovery.note(SAVE_SNAPSHOT, None, 0, 2)
    recovery.note(COMMIT_STEP, None, 0, 2)
    for inner_step, phases in enumerate([(OLD_LOG_PROBS, VALUES, CRITIC, ACTOR), (OLD_LOG_PROBS,)]):
        for phase in phases:
            recovery.note(phase, "b3", inner_step, 3)
    assert asyncio.run(recovery.guard(failing(LOST))) == 7
    assert cluster.events == [
        "restart", "load N2 by restore_training", "publish", "compute_old_log_probs b3.0",
        "update_critic b3.0", "update_actor b3.0", "compute_old_log_probs b3.1",
    ]  # fmt: skip
    assert recovery.restarts == 1


def test_after_the_snapshot_nothing_is_repeated():
    cluster = Cluster()
    recovery = make(cluster)
    recovery.note(ACTOR, "b1", 0, 1)
    recovery.note(SAVE_SNAPSHOT, None, 0, 1)
    asyncio.run(recovery.guard(failing(LOST)))
    assert cluster.events == ["restart", "load N1 by restore_training", "publish"]


def test_ranks_that_disagree_go_back_too_and_other_errors_are_not_its_affair():
    cluster = Cluster()
    recovery = make(cluster)
    assert asyncio.run(recovery.guard(failing(RankDisagreementError("rank 0: 1, rank 1: 2")))) == 7
    with pytest.raises(DataError):
        asyncio.run(recovery.guard(failing(DataError("a row"))))
    assert recovery.restarts == 1


def test_one_that_dies_again_is_started_again_and_after_three_times_ends_the_attempt():
    cluster = Cluster(dies_at_start=1)
    recovery = make(cluster)
    assert asyncio.run(recovery.guard(failing(LOST))) == 7
    assert recovery.restarts == 2
    assert asyncio.run(recovery.guard(failing(LOST))) == 7
    with pytest.raises(TrainingGroupLostError):
        asyncio.run(recovery.guard(failing(LOST)))
    assert cluster.events.count("restart") == MAX_RESTARTS
    recovery.note(SAVE_SNAPSHOT, None, 0, 1)  # the next step has tries of its own
    assert asyncio.run(recovery.guard(failing(LOST))) == 7


@pytest.mark.parametrize("options", [{"is_enabled": False}, {"steps": ()}])
def test_without_a_snapshot_the_attempt_ends_as_crashed(options):
    cluster = Cluster()
    recovery = make(cluster, **options)
    with pytest.raises(TrainingGroupLostError) as raised:
        asyncio.run(recovery.guard(failing(LOST)))
    assert cluster.events == []
    assert is_transient(raised.value)


def test_a_phase_is_not_tried_again_with_a_group_that_is_lost():
    state = SimpleNamespace(data=LOST)
    assert retry_transient(None, None, state) is False


def test_tries_after_a_restart_are_later_than_those_before():
    recovery = make(Cluster())
    assert recovery.first_try == 1
    asyncio.run(recovery.guard(failing(LOST)))
    assert recovery.first_try == 1 + TRIES


def test_a_hooks_thread_waits_until_the_group_is_back():
    cluster = Cluster()
    recovery = make(cluster)

    async def flow():
        recovery.loop = asyncio.get_running_loop()
        await asyncio.to_thread(recovery.restore_from_thread, LOST)

    asyncio.run(flow())
    assert cluster.events == ["restart", "load N0 by restore_training", "publish"]

    async def again():
        recovery.loop = asyncio.get_running_loop()
        recovery._is_enabled = False
        await asyncio.to_thread(recovery.restore_from_thread, LOST)

    with pytest.raises(TrainingGroupLostError):
        asyncio.run(again())
