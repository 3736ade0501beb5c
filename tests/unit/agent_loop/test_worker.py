import asyncio
import subprocess
import sys
import time

import pytest

from rlcore.agent_loop import AgentLoopBase, register
from rlcore.agent_loop.worker import AgentLoopWorker, WorkerTimes
from rlcore.agent_loop.writer import RowWriter
from rlcore.buffer.ledger import Ledger
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ActorUnavailableError, FencedError
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.rewards import InlineRewards
from rlcore.testing.rollout import CountingReplica, LocalLedger, MemoryQueue
from rlcore.types import CallKey

PARTITION = "run/train"
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="test")


@register("test_blocks_the_loop")
class BlocksTheLoop(AgentLoopBase):
    """User code that blocks the event loop, longer than a lease lasts."""

    async def run(self, sampling_params, **row):
        time.sleep(0.3)  # noqa: ASYNC251  the fault under test
        raise RuntimeError("done blocking")


async def until(is_done):
    async with asyncio.timeout(10):
        while True:
            if is_done():
                return
            await asyncio.sleep(0.005)


class Harness:
    """A worker with a real ledger and in-process replica and queue."""

    def __init__(
        self, config, tmp_path, *, num_prompts, replica=None, reward=None, fields=None, **ledger
    ):
        self.config = config
        self.queue = MemoryQueue()
        self.replica = replica or CountingReplica(num_tokens=4)
        self.rewards = InlineRewards(reward) if reward else InlineRewards.from_config(config)
        self.ledger = Ledger("run", tmp_path / "journal.jsonl", 1, **ledger)
        self.local = LocalLedger(self.ledger)
        dataset = load_dataset(config, "train")
        order = PromptOrder(num_rows=len(dataset), batch_size=1, shuffle=False, seed=0)
        self.specs = make_specs(
            dataset, order, start=0, count=num_prompts, run_id="run", partition_id=PARTITION,
            global_step=1, num_sessions=config.actor_rollout_ref.rollout.n,
        )  # fmt: skip
        for spec in self.specs:
            spec.fields.update(fields or {})
        self.ledger.feed(KEY, self.specs)

    def worker(self, worker_id="worker-0", renew_interval_s=0.02):
        model = self.config.actor_rollout_ref.model.path
        router = Router({"replica-0": self.replica}, empty_deadline_s=0.05)
        return AgentLoopWorker(
            self.config,
            worker_id,
            ledger=self.local,
            queue=self.queue,
            client=LLMServerClient(router, seed=0),
            tokenizer=load_tokenizer(model),
            rewards=self.rewards,
            times=WorkerTimes(claim_wait_s=0.02, renew_interval_s=renew_interval_s),
        )

    async def run_until(self, worker, is_done, drain_s=5.0):
        running = asyncio.create_task(worker.run_forever())
        await until(lambda: is_done() or running.done())
        worker.stop(drain_s)
        await running

    def count(self, status):
        return self.ledger.counts(PARTITION).get(status, 0)


@pytest.fixture
def harness(make_config, tmp_path):
    def harness(num_prompts=4, replica=None, reward=None, fields=None, lease_s=60.0, **overrides):
        return Harness(
            make_config(**overrides), tmp_path, num_prompts=num_prompts, replica=replica,
            reward=reward, fields=fields, claim_lease_s=lease_s,
        )  # fmt: skip

    return harness


def test_every_session_of_every_prompt_is_stored_before_its_group_settles(harness):
    h = harness(num_prompts=6)
    settled_without_rows = []
    settle = h.ledger.settle

    def checked_settle(worker_id, uid, sessions):
        keys = [key for session in sessions for key in session.keys]
        if not all((PARTITION, key) in h.queue.rows for key in keys):
            settled_without_rows.append(uid)
        return settle(worker_id, uid, sessions)

    h.ledger.settle = checked_settle
    worker = h.worker()
    asyncio.run(h.run_until(worker, lambda: h.count("finished") == 6))
    assert settled_without_rows == []
    assert sorted(key for _, key in h.queue.rows) == sorted(
        f"{spec.uid}_{session}_0" for spec in h.specs for session in range(4)
    )
    batch = h.ledger.sample(KEY, PARTITION, 6)
    assert batch.uids == [spec.uid for spec in h.specs]
    assert [tag["reward"] for tag in batch.tags] == [
        pytest.approx(h.queue.rows[PARTITION, key]["rm_scores"][-1]) for key in batch.keys
    ]
    status = worker.status()
    assert (status.claimed, status.finished, status.failed) == (6, 6, 0)
    assert (status.tokens, status.active_sessions) == (6 * 4 * 4, 0)
    h.ledger.check_conservation()


def test_rows_do_not_depend_on_order_or_company(harness, tmp_path):
    def rows(num_prompts, delay_s):
        h = harness(num_prompts, CountingReplica(num_tokens=4, delay_s=delay_s))
        asyncio.run(h.run_until(h.worker(), lambda: h.count("finished") == num_prompts))
        return {key: row["responses"].tolist() for (_, key), row in h.queue.rows.items()}

    alone = rows(1, 0.0)
    (tmp_path / "journal.jsonl").unlink()
    together = rows(5, 0.005)
    assert {key: together[key] for key in alone} == alone
    assert len({tuple(tokens) for tokens in together.values()}) > 10


def test_a_failed_session_settles_its_group_as_a_failure_with_the_other_rows(harness):
    def reward(solution_str, extra_info, **row):
        if extra_info["index"] == 1:
            raise ValueError("bad row")
        return 1.0

    h = harness(num_prompts=2, reward=reward)
    worker = h.worker()
    asyncio.run(h.run_until(worker, lambda: h.count("finished") == h.count("failure") == 1))
    assert {key.rpartition("_")[0].rpartition("_")[0] for _, key in h.queue.rows} == {
        h.specs[0].uid
    }
    status = worker.status()
    assert (status.finished, status.failed, status.failed_sessions) == (1, 1, 4)
    assert "row 1 (uid" in status.last_error
    assert status.last_error.endswith("ValueError: bad row")


def test_it_claims_only_what_fits_its_slots(harness):
    # Twice 16 slots / 4 sessions a prompt = 8 prompts at once.
    h = harness(num_prompts=20, replica=CountingReplica(num_tokens=4, delay_s=0.03))
    most = 0

    def is_done():
        nonlocal most
        most = max(most, h.count("running"))
        return h.count("finished") == 20

    asyncio.run(h.run_until(h.worker(), is_done))
    assert most == 8


def test_leases_are_renewed_while_user_code_blocks_the_event_loop(harness):
    h = harness(
        num_prompts=1,
        lease_s=0.15,
        fields={"agent_name": "test_blocks_the_loop"},
        actor_rollout_ref__rollout__n=2,
    )

    def is_done():
        h.ledger.expire()
        return h.count("failure") == 1

    asyncio.run(h.run_until(h.worker(), is_done))
    assert len(h.local.renewed) >= 5
    assert h.count("pending") == 0


def test_a_lost_lease_cancels_its_sessions_and_the_prompt_is_done_by_another(harness):
    h = harness(num_prompts=1, replica=CountingReplica(num_tokens=4, delay_s=30))

    async def run():
        first = h.worker("worker-0")
        running = asyncio.create_task(first.run_forever())
        await until(lambda: h.replica.requests)
        h.ledger.release_worker("worker-0")
        assert [s.uid for s in h.ledger.claim(1, "worker-1", 1)] == [h.specs[0].uid]
        await until(lambda: not first.status().active_prompts)
        first.stop()
        await running

    asyncio.run(run())
    assert h.queue.rows == {}
    assert h.count("running") == 1  # worker-1's


def test_a_group_that_settles_too_late_is_left_to_the_new_owner(harness):
    h = harness(num_prompts=1, replica=CountingReplica(num_tokens=4, delay_s=0.1))

    async def run():
        worker = h.worker(renew_interval_s=60)
        running = asyncio.create_task(worker.run_forever())
        await until(lambda: h.replica.requests)
        h.ledger.release_worker("worker-0")
        h.ledger.claim(1, "worker-1", 1)
        await until(lambda: not worker.status().active_prompts)
        worker.stop()
        await running
        return worker.status()

    status = asyncio.run(run())
    assert (status.finished, status.failed) == (0, 0)
    assert h.count("running") == 1


@pytest.mark.parametrize("fault", ["queue", "replica", "attempt"])
def test_a_fault_of_a_collaborator_ends_the_worker_and_settles_nothing(harness, fault):
    replica = CountingReplica(dies_after=0) if fault == "replica" else None
    h = harness(num_prompts=2, replica=replica)
    if fault == "queue":
        h.queue.is_dead = True
    if fault == "attempt":
        h.ledger.fence(2)
    expected = FencedError if fault == "attempt" else ActorUnavailableError
    with pytest.raises(expected):
        asyncio.run(h.run_until(h.worker(), lambda: False))
    assert h.count("finished") == h.count("failure") == 0
    h.ledger.check_conservation()


def test_a_failing_renewal_ends_the_worker(harness):
    h = harness(num_prompts=1, replica=CountingReplica(delay_s=30))

    def renew(worker_id, uids):
        raise ActorUnavailableError("the ledger was killed by the test")

    h.local.renew = renew
    with pytest.raises(ActorUnavailableError, match="ledger was killed"):
        asyncio.run(h.run_until(h.worker(), lambda: False))


def test_stop_lets_running_prompts_end(harness):
    h = harness(num_prompts=2, replica=CountingReplica(num_tokens=4, delay_s=0.1))
    asyncio.run(h.run_until(h.worker(), lambda: len(h.replica.requests) == 8, drain_s=5))
    assert (h.count("finished"), h.count("pending")) == (2, 0)


def test_what_does_not_end_in_time_goes_back_to_pending(harness):
    h = harness(num_prompts=2, replica=CountingReplica(num_tokens=4, delay_s=30))
    asyncio.run(h.run_until(h.worker(), lambda: len(h.replica.requests) == 8, drain_s=0))
    assert (h.count("finished"), h.count("pending"), h.count("running")) == (0, 2, 0)


def test_groups_that_end_together_are_written_together():
    queue = MemoryQueue()

    async def run():
        writer = RowWriter(queue)
        await asyncio.gather(
            *(
                writer.put("p", [f"{i}-{j}" for j in range(60)], [{}] * 60, [{}] * 60)
                for i in range(6)
            ),
            writer.put("q", ["other"], [{}], [{}]),
            writer.put("p", [], [], []),
        )

    asyncio.run(run())
    # At most 256 rows a put, groups stay whole, partitions apart.
    assert queue.batch_sizes == [240, 120, 1]
    assert len(queue.rows) == 361


def test_a_worker_process_imports_no_torch(make_config, tmp_path):
    config = make_config()
    code = f"""
import asyncio, sys
import rlcore.cluster.agent_loop_worker
from rlcore.config import RunConfig
from rlcore.agent_loop.session import SessionRunner
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.reward.loop import RewardLoopManager
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.rollout import CountingReplica

config = RunConfig.model_validate_json({config.model_dump_json()!r})
dataset = load_dataset(config, "train")
order = PromptOrder(num_rows=len(dataset), batch_size=1, shuffle=False, seed=0)
[spec] = make_specs(dataset, order, start=0, count=1, run_id="r", partition_id="r/train",
                    global_step=1, num_sessions=1)
client = LLMServerClient(Router({{"a": CountingReplica(num_tokens=3)}}), seed=0)
tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
rewards = RewardLoopManager(config)
runner = SessionRunner(config, client, tokenizer, rewards, [2])

async def run():
    await rewards.start()
    result = await runner.run(spec, 0)
    await rewards.close()
    return result

result = asyncio.run(run())
assert result.record.error_message == "", result.record.error_message
print(len(result.rows[0]["responses"]), "torch" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert out.stdout == "3 False\n", out.stderr
