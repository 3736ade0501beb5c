"""An AgentLoopWorker process between a real ledger actor and stand-ins for replica and queue."""

import asyncio

import pytest
import ray

from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.cluster.ledger import LedgerActor
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.errors import ActorUnavailableError
from rlcore.testing.rollout import CountingReplica, MemoryQueueHost
from rlcore.testing.tiny_run import tiny_config
from rlcore.types import CallKey

pytestmark = pytest.mark.integration

PARTITION = "run/train"
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="test")


class Cluster:
    """One worker and what it talks to."""

    def __init__(self, tmp_path, *, num_prompts, session_deadline_s=600, **replica):
        config = tiny_config(tmp_path, {"deadlines.session": session_deadline_s})
        dataset = load_dataset(config, "train")
        order = PromptOrder(num_rows=len(dataset), batch_size=1, shuffle=False, seed=0)
        self.specs = make_specs(
            dataset, order, start=0, count=num_prompts, run_id="run", partition_id=PARTITION,
            global_step=1, num_sessions=4,
        )  # fmt: skip
        self.replica = ray.remote(num_cpus=0)(CountingReplica).remote(**replica)
        self.host = ray.remote(num_cpus=0)(MemoryQueueHost).remote()
        actor = LedgerActor.remote("run", str(tmp_path / "journal.jsonl"), 1)
        self.ledger = LedgerClient(actor)
        self.worker = AgentLoopWorkerHandle.create(
            config, 0, attempt=1, ledger=actor, queue_host=self.host,
            replicas={"replica-0": self.replica},
        )  # fmt: skip

    def count(self, status):
        return self.ledger.counts(PARTITION).get(status, 0)

    async def until(self, status, count):
        async with asyncio.timeout(60):
            while self.count(status) != count:
                await self.worker.status(10)
                await asyncio.sleep(0.02)

    def close(self):
        self.worker.kill()
        for actor in (self.replica, self.host, self.ledger.handle):
            ray.kill(actor)


@pytest.fixture
def cluster(ray_session, tmp_path):
    clusters = []

    def cluster(**options):
        clusters.append(Cluster(tmp_path, **options))
        return clusters[-1]

    yield cluster
    for each in clusters:
        each.close()


def test_a_worker_process_runs_prompts_and_ends_with_its_totals(cluster):
    c = cluster(num_prompts=6, num_tokens=5)

    async def run():
        await c.worker.ready(120)
        assert c.ledger.feed(KEY, c.specs) == 6
        await c.until("finished", 6)
        return await c.worker.stop(20)

    totals = asyncio.run(run())
    assert totals == {
        "claimed": 6.0, "finished": 6.0, "failed": 0.0, "failed_sessions": 0.0, "tokens": 120.0,
    }  # fmt: skip
    batch = c.ledger.sample(KEY, PARTITION, 6)
    rows = ray.get(c.host.stored.remote(), timeout=30)
    assert batch.uids == [spec.uid for spec in c.specs]
    assert sorted(batch.keys) == sorted(key for _, key in rows)
    assert all(len(row["responses"]) == 5 for row in rows.values())
    assert len({tuple(row["responses"]) for row in rows.values()}) > 20


def test_a_killed_worker_is_reported_and_its_prompts_are_done_by_another(cluster):
    c = cluster(num_prompts=2, num_tokens=5, delay_s=60)

    async def run():
        await c.worker.ready(120)
        c.ledger.feed(KEY, c.specs)
        await c.until("running", 2)
        c.worker.kill()
        with pytest.raises(ActorUnavailableError, match="process is gone"):
            async with asyncio.timeout(30):
                while True:
                    await c.worker.status(10)
                    await asyncio.sleep(0.02)

    asyncio.run(run())
    assert sorted(c.ledger.release_worker(c.worker.worker_id)) == sorted(s.uid for s in c.specs)
    # The dead worker's long poll still waits in the ledger: it must not get them again.
    assert (c.count("pending"), c.count("running")) == (2, 0)
    assert len(c.ledger.claim(1, "another", 8)) == 2


def test_a_session_that_is_over_frees_its_request(cluster):
    c = cluster(num_prompts=1, num_tokens=5, delay_s=60, session_deadline_s=0.5)

    async def run():
        await c.worker.ready(120)
        c.ledger.feed(KEY, c.specs)
        await c.until("failure", 1)
        async with asyncio.timeout(30):
            while True:
                if not ray.get(c.replica.num_running.remote(), timeout=10):
                    break
                await asyncio.sleep(0.02)
        return await c.worker.status(10)

    status = asyncio.run(run())
    assert (status.failed, status.failed_sessions, status.in_flight) == (1, 4, {"replica-0": 0})
    assert "not finished after deadlines.session=0.5 s" in status.last_error
