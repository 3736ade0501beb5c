"""What a producer does when its worker, a replica or the ledger dies; no Ray, no Prefect server."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from rlcore.config.trainer import DeadlinesConfig
from rlcore.errors import (
    ActorUnavailableError,
    ConfigError,
    DeadlineExceededError,
    FencedError,
    NoReplicaError,
    ReplicaDiedError,
)
from rlcore.testing.cluster import FakeCluster
from tasks.producers import Supervisor, SupervisorTimes

FAST = {"poll_s": 0.005, "backoff_s": 0.005, "ledger_retry_s": 0.005}
DIES = {"lives": 1}


class Run:
    """What a supervisor needs of a run."""

    def __init__(self, cluster, **deadlines):
        self.cluster = cluster
        self.config = SimpleNamespace(deadlines=DeadlinesConfig(**deadlines))
        self.stop = asyncio.Event()
        self.drain_s = 5.0
        self.ready = []

    def producer_is_ready(self, index):
        self.ready.append(index)


def supervise(run, *, until=lambda: False, index=0, **times):
    """Supervise until the supervisor ends, or until `until()`; then stop the run."""
    supervisor = Supervisor(
        run, index, logging.getLogger("test"), SupervisorTimes(**{**FAST, **times})
    )

    async def main():
        async with asyncio.timeout(20):
            ending = asyncio.create_task(supervisor.run())
            while not (ending.done() or until()):  # noqa: ASYNC110 - looked at from outside
                await asyncio.sleep(0.002)
            run.stop.set()
            return await ending

    return asyncio.run(main())


def has(cluster, call):
    return lambda: call in cluster.calls.names


def test_a_dead_worker_is_killed_then_its_prompts_released_then_another_started(caplog):
    cluster = FakeCluster(DIES)
    run = Run(cluster)
    with caplog.at_level(logging.INFO):
        totals = supervise(run, until=has(cluster, "ready w2"))
    assert cluster.calls.names == [
        "ready w1", "kill w1", "release w1", "ready w2", "stop w2 within 5", "kill w2",
    ]  # fmt: skip
    assert totals.keys() == {"tokens"}
    assert run.ready == [0, 0]
    assert "agent loop worker 0 died: w1 was killed by the test" in caplog.messages


def test_a_worker_that_does_not_start_is_replaced_but_a_user_error_ends_the_run():
    cluster = FakeCluster({"fails_to_start": ActorUnavailableError("w1.start: did not answer")})
    supervise(Run(cluster), until=has(cluster, "ready w2"))
    assert cluster.calls.names[:3] == ["ready w1", "kill w1", "release w1"]
    cluster = FakeCluster({"fails_to_start": ConfigError("no such reward function")})
    with pytest.raises(ConfigError, match="no such reward function"):
        supervise(Run(cluster))
    assert cluster.calls.names == ["ready w1", "kill w1"]


def test_the_wait_before_a_restart_doubles():
    cluster = FakeCluster(DIES, DIES, DIES)
    supervise(Run(cluster), until=has(cluster, "ready w4"), backoff_s=0.05)
    for number, least_s in ((1, 0.05), (2, 0.1), (3, 0.2)):
        waited_s = cluster.calls.seconds_between(f"release w{number}", f"ready w{number + 1}")
        assert least_s <= waited_s


def test_after_five_restarts_in_a_row_the_run_ends_with_the_last_death():
    cluster = FakeCluster(*[DIES] * 9)
    with pytest.raises(
        ActorUnavailableError, match="worker 0 died 6 times; last: w6 was killed by the test"
    ):
        supervise(Run(cluster))
    assert cluster.calls.names[-3:] == ["ready w6", "kill w6", "release w6"]


def test_restarts_are_counted_anew_after_a_healthy_time():
    cluster = FakeCluster(*[{"lives": 2}] * 8)
    supervise(Run(cluster), until=has(cluster, "ready w9"), healthy_s=0.0)
    assert cluster.calls.names.count("release w8") == 1


def test_a_worker_that_does_not_drain_is_killed():
    cluster = FakeCluster({"drain_s": 60})
    run = Run(cluster)
    run.drain_s = 0.05
    assert supervise(run, until=has(cluster, "ready w1")) == {}
    assert cluster.calls.names == ["ready w1", "stop w1 within 0.05", "kill w1"]


def test_no_worker_is_started_for_a_run_that_ends_meanwhile():
    cluster = FakeCluster(DIES)
    assert supervise(Run(cluster), until=has(cluster, "release w1"), backoff_s=30.0) == {}
    assert cluster.calls.names == ["ready w1", "kill w1", "release w1"]


LOST = ReplicaDiedError("replica-0 could not be replaced in 5 tries; last: scripted failure")


def test_a_replica_that_cannot_be_replaced_ends_the_run_at_once_with_its_error():
    cluster = FakeCluster(lost=LOST)
    with pytest.raises(ReplicaDiedError, match="scripted failure"):
        supervise(Run(cluster))
    assert cluster.calls.names == ["ready w1", "kill w1"]


def test_a_worker_that_dies_of_lost_replicas_is_not_restarted():
    cluster = FakeCluster({"lives": 0}, lost=LOST)
    with pytest.raises(ReplicaDiedError, match="scripted failure"):
        supervise(Run(cluster))
    assert cluster.calls.names == ["ready w1", "kill w1"]


def test_a_worker_hears_of_a_replica_that_another_took_the_place_of():
    cluster = FakeCluster()
    cluster.replicas = {"r0": "one", "r1": "two"}
    steps = [("w1 hears of one, two", "three"), ("w1 hears of one, three", None)]

    def until():
        while steps and steps[0][0] in cluster.calls.names:
            _, new = steps.pop(0)
            if new is not None:
                cluster.replicas = {"r0": "one", "r1": new}
        return not steps

    supervise(Run(cluster), until=until)
    assert cluster.calls.names[:3] == ["ready w1", "w1 hears of one, two", "w1 hears of one, three"]


def test_a_worker_that_leaves_a_replica_out_hears_that_it_serves():
    """The replica failed one request of the worker, and the watch over replicas finds it well."""
    cluster = FakeCluster()
    cluster.replicas = {"r0": "one", "r1": "two"}
    worker = cluster.new_agent_loop_worker(0)
    cluster.new_agent_loop_worker = lambda index: worker
    steps = ["leave out", "heard"]

    def until():
        heard = cluster.calls.names.count("w1 hears of one, two")
        if heard == 1 and steps[0] == "leave out":
            steps.pop(0)
            worker._replicas = ["r0"]
        return heard == 2

    supervise(Run(cluster), until=until)
    assert worker._replicas == ["r0", "r1"]
    # It is told once, not at every look.
    assert cluster.calls.names == [
        "ready w1", "w1 hears of one, two", "w1 hears of one, two", "stop w1 within 5", "kill w1",
    ]  # fmt: skip


def test_prompts_are_not_to_blame_for_a_worker_that_found_no_replica():
    cluster = FakeCluster({"lives": 1, "dies_of": NoReplicaError("waited 300 s")}, DIES)
    supervise(Run(cluster), until=has(cluster, "ready w3"))
    released = [name for name in cluster.calls.names if name.startswith("release")]
    assert released == ["release w1 (blameless)", "release w2"]


def test_a_ledger_that_is_started_anew_is_asked_again():
    failures = [
        ActorUnavailableError("ledger.release_worker: the actor's process is gone"),
        DeadlineExceededError("ledger.release_worker did not answer within 60 s"),
    ]
    cluster = FakeCluster(DIES, ledger_failures=failures)
    supervise(Run(cluster), until=has(cluster, "ready w2"))
    assert cluster.calls.names[:4] == ["ready w1", "kill w1", "release w1", "ready w2"]


def test_a_ledger_that_stays_away_ends_the_run_with_who_waited_for_what():
    failures = [ActorUnavailableError("the process is gone")] * 1000
    cluster = FakeCluster(DIES, ledger_failures=failures)
    with pytest.raises(
        ActorUnavailableError,
        match=r"producer 0 waited 0\.1 s for the ledger to take back the prompts of w1; last: ",
    ):
        supervise(Run(cluster, start=0.1))
    cluster = FakeCluster(DIES, ledger_failures=[FencedError("attempt 2 has called")])
    with pytest.raises(FencedError, match="attempt 2"):
        supervise(Run(cluster))
