"""Queue host, queue client, ledger actor and replay buffer together on a real Ray cluster."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
import torch

from rlcore.buffer.replay_buffer import ReplayBuffer
from rlcore.buffer.transfer_queue import QueueClient, attached_queue, find_controller
from rlcore.cluster import queue_host
from rlcore.cluster.ledger import start_ledger
from rlcore.cluster.queue_host import start_queue_host, stop_queue_host
from rlcore.config.queue import MooncakeStoreConfig
from rlcore.errors import (
    ActorUnavailableError,
    ConfigError,
    DataError,
    DeadlineExceededError,
    DeviceLockError,
    FencedError,
    TransientError,
)
from rlcore.testing.ledger import prompt_spec, sessions_of
from rlcore.types import CallKey

pytestmark = pytest.mark.integration
TRAIN = "run-1/train"


MIB = 1024**2
STORE = MooncakeStoreConfig(
    auto_init=True,
    master_server_address="127.0.0.1:0",
    local_hostname="127.0.0.1",
    global_segment_size=64 * MIB,
    local_buffer_size=16 * MIB,
)


@pytest.fixture(scope="module", params=["SimpleStorage", "MooncakeStore"])
def host(ray_session, request):
    store = STORE if request.param == "MooncakeStore" else None
    client = start_queue_host("run-1", 1, store=store)
    yield client
    stop_queue_host("run-1", 1)
    assert find_controller() is None
    attached_queue.cache_clear()  # the next queue is another one, as for another process


@pytest.fixture
def queue(host):
    client = QueueClient(deadline_s=20)
    yield client
    for partition_id in client.partitions():
        client.clear_partition(partition_id)
    client.detach()


def key(step=1, *, attempt=1, try_number=1):
    return CallKey(
        run_id="run-1", attempt=attempt, global_step=step, phase="test", try_number=try_number
    )


def numpy_row(length, *, first=0):
    return {
        "prompts": np.arange(first, first + 3),
        "responses": np.arange(length),
        "response_mask": np.ones(length, dtype=np.int64),
        "rollout_log_probs": np.linspace(-1, 0, length, dtype=np.float32),
    }


def test_rows_come_back_in_the_order_of_the_keys(host, queue):
    keys = [f"u{i}_0_0" for i in range(8)]
    rows = [numpy_row(i + 1, first=2**40 + i) for i in range(8)]
    host.put_rows(1, TRAIN, keys, rows, [{"i": i} for i in range(8)])
    order = [5, 0, 7, 3]
    columns = ["prompts", "responses", "rollout_log_probs"]
    got = queue.get(TRAIN, [keys[i] for i in order], columns)
    for name in columns:
        for row, i in zip(got[name], order, strict=True):
            assert torch.equal(row, torch.from_numpy(rows[i][name]))
    assert queue.list(TRAIN) == {k: {"i": i} for i, k in enumerate(keys)}
    # Results are copies: changing one changes nothing that is stored.
    got["responses"][0].fill_(99)
    assert queue.get(TRAIN, [keys[5]], ["responses"])["responses"][0].tolist() == list(range(6))
    queue.clear(TRAIN, [*keys[1:], "unknown_0_0"])
    assert list(queue.list(TRAIN)) == keys[:1]
    host.clear_partition(1, TRAIN)
    assert queue.partitions() == []
    assert queue.get(TRAIN, [], ["responses"]) == {"responses": []}


def test_large_integers_and_empty_rows_survive(queue):
    columns = {
        "prompts": [torch.tensor([16777217]), torch.tensor([1, 2**53 + 1])],
        "responses": [torch.zeros(0, dtype=torch.int64)] * 2,
    }
    queue.put(TRAIN, ["a_0_0", "b_0_0"], columns, create=True)
    got = queue.get(TRAIN, ["b_0_0", "a_0_0"], ["prompts", "responses"])
    assert [row.tolist() for row in got["prompts"]] == [[1, 2**53 + 1], [16777217]]
    assert [row.tolist() for row in got["responses"]] == [[], []]


def test_what_the_package_passes_over_is_an_error(host, queue):
    keys = ["a_0_0", "b_0_0"]
    host.put_rows(1, TRAIN, keys, [numpy_row(2), numpy_row(3)])
    half = [torch.zeros(2)]
    queue.put(TRAIN, keys[:1], {"entropy": half})
    ints, floats = [torch.arange(2), torch.arange(3)], [torch.zeros(2), torch.zeros(3)]
    for call, message in (
        (lambda: queue.get(TRAIN, ["a_0_0", "z_0_0"], ["responses"]), "1 of 2 rows .*: z_0_0"),
        (lambda: queue.get("run-1/none", ["a_0_0"], ["responses"]), "not in partition run-1/none"),
        (lambda: queue.get(TRAIN, keys, ["entropy"]), "1 of 2 rows .* lack .*: b_0_0"),
        (lambda: queue.get(TRAIN, keys, ["loss_mask"]), "unknown column 'loss_mask'"),
        (lambda: queue.get(TRAIN, ["a_0_0", "a_0_0"], ["responses"]), "given twice: a_0_0"),
        (lambda: queue.put(TRAIN, ["z_0_0"], {"entropy": half}), "rows are not in .*: z_0_0"),
        (lambda: queue.put(TRAIN, keys, {"entropy": half}), "1 rows for 2 keys"),
        (lambda: queue.put(TRAIN, keys, {"entropy": ints}), "must be float32"),
        (lambda: queue.put(TRAIN, keys, {"entropy": floats[:1] * 2, "returns": floats}),
         "row b_0_0 has 3 entries in returns and 2 in entropy"),
        (lambda: queue.put(TRAIN, keys, {}), "no column"),
        (lambda: queue.put(TRAIN, keys, {"entropy": floats}, tags=[{}]), "2 keys and 1 tags"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            call()
    # A column of another length than the row's others is found when both are read.
    queue.put(TRAIN, keys[1:], {"returns": [torch.zeros(7)]})
    with pytest.raises(DataError, match="row b_0_0 has 7 entries in returns and 3 in responses"):
        queue.get(TRAIN, keys[1:], ["responses", "returns"])
    assert queue.incomplete(TRAIN, [*keys, "z_0_0"], ["responses", "entropy"]) == ["b_0_0", "z_0_0"]
    # A cleared row's place is used again; its old columns must not show.
    queue.clear(TRAIN, keys)
    host.put_rows(1, TRAIN, keys, [numpy_row(2), numpy_row(3)])
    assert queue.incomplete(TRAIN, keys, ["entropy"]) == keys


def test_the_host_checks_rows_and_callers(host):
    good = numpy_row(2)
    for rows, message in (
        ([{**good, "responses": np.arange(2, dtype=np.int32)}], "torch.int32"),
        ([{**good, "unknown": np.arange(2)}], "unknown column"),
        ([{"responses": np.arange(2)}], "row a_0_0 has the columns"),
        ([good, good], "1 row keys and 2 rows"),
        ([{**good, "responses": np.arange(5)}], "row a_0_0 has 2 entries in response_mask and 5"),
    ):
        with pytest.raises(DataError, match=message):
            host.put_rows(key(), TRAIN, ["a_0_0"], rows)
    with pytest.raises(FencedError, match="attempt 0 was refused"):
        host.put_rows(0, TRAIN, ["a_0_0"], [good])
    with pytest.raises(FencedError, match="run-2 does not hold the queue"):
        host.put_rows(1, "run-2/train", ["a_0_0"], [good])


def test_the_pinned_thread_count_survives_a_transfer(host, queue):
    host.put_rows(1, TRAIN, ["a_0_0"], [numpy_row(2)])
    before = torch.get_num_threads()
    other = 1 if before != 1 else 2
    seen = []
    try:
        torch.set_num_threads(other)
        queue.get(TRAIN, ["a_0_0"], ["responses"])
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), seen) == (other, [other])
    finally:
        torch.set_num_threads(before)


def test_a_second_run_is_refused_until_the_first_is_dead(host):
    @ray.remote(num_cpus=0)
    class Witness:
        pass

    with pytest.raises(DeviceLockError, match=r"used by run run-1 \(attempt 1\)"):
        start_queue_host("run-2", 1)
    # The same attempt of the same run may come again, and now brings a witness.
    witness = Witness.remote()
    start_queue_host("run-1", 1, witness=witness)
    with pytest.raises(DeviceLockError, match="run-1"):
        start_queue_host("run-2", 1)
    host.put_rows(1, TRAIN, ["a_0_0"], [numpy_row(2)])
    ray.kill(witness)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(witness.__ray_ready__.remote(), timeout=20)
    start_queue_host("run-2", 1)
    assert host.runs() == ["run-2"]
    assert QueueClient(20).partitions() == []
    with pytest.raises(FencedError, match="run-1 does not hold the queue"):
        host.put_rows(1, TRAIN, ["a_0_0"], [numpy_row(2)])
    # Hand it back for the other tests, by sharing.
    start_queue_host("run-2", 1, shared=True)
    start_queue_host("run-1", 1, shared=True)
    stop_queue_host("run-2", 1)
    assert host.runs() == ["run-1"]


def test_too_few_cpus_are_refused(host):
    with pytest.raises(ConfigError, match=r"needs 1001 free CPUs .* 1000 storage\); .* are free"):
        queue_host._check_cpus(1000)


def test_ledger_and_replay_buffer_across_processes(host, queue, tmp_path):
    ledger = start_ledger("run-1", str(tmp_path / "ledger.jsonl"), 1, claim_lease_s=1.0)
    ledger.feed(key(), [prompt_spec(uid) for uid in ("a", "b")])

    def settle(uid, num_failed=0):
        keys = [f"{uid}_{i}_0" for i in range(2)]
        host.put_rows(1, TRAIN, keys, [numpy_row(2)] * 2)
        ledger.settle("w0", uid, sessions_of(uid, num=2, num_failed=num_failed))

    def work():
        # w1 dies with its prompt: the lease lapses and wakes the claim that waits.
        assert [spec.uid for spec in ledger.claim(1, "w1", 1)] == ["a"]
        assert [spec.uid for spec in ledger.claim(1, "w0", 1)] == ["b"]
        settle("b", num_failed=1)
        # c is fed at once in b's place, a comes back when its lease lapses.
        for expected in ("c", "a"):
            [spec] = ray.get(ledger.handle.claim.remote(1, "w0", 1, 20.0), timeout=30)
            assert spec.uid == expected
            settle(spec.uid)

    def refill(count):
        ledger.feed(key(), [prompt_spec(uid) for uid in ["c"][:count]])

    buffer = ReplayBuffer(ledger, run_id="run-1", attempt=1, deadline_s=30, refill_fn=refill)
    with ThreadPoolExecutor(1) as pool:
        worked = pool.submit(work)
        batch, metrics = buffer.sample(1, "train", 2)
        worked.result()
    assert batch.uids == ["a", "c"]
    assert metrics["rollout/refilled_prompts"] == 1
    assert metrics["rollout/sample_wait_s"] > 0.5
    assert len(queue.get(TRAIN, batch.keys, ["responses"])["responses"]) == 4
    queue.clear(TRAIN, ledger.mark_trained(key(), 1))
    ledger.check_conservation()

    ledger.feed(key(2), [prompt_spec("d", global_step=2)])
    ledger.claim(1, "w0", 1)
    with pytest.raises(
        DeadlineExceededError,
        match=r"step 2\.0 phase test .* waited 0\.3 s for 1 finished prompts in run-1/train.*"
        r"'running': 1.*d \(step 2\): running for 0\.\d s, owner w0",
    ):
        ledger.wait_sample(key(2), TRAIN, 1, 0.3)
    with pytest.raises(DeadlineExceededError, match=r"waited 0\.2 s for every prompt to settle"):
        ledger.wait_settled(key(2), TRAIN, 0.2)
    with pytest.raises(FencedError, match="attempt 2 has begun"):
        ledger.fence(2)
        ledger.sample(key(2), TRAIN, 1)
    ray.kill(ledger.handle)
    with pytest.raises(ActorUnavailableError, match=r"ledger\.counts"):
        ledger.counts(TRAIN)


def test_the_ledger_actor_needs_no_torch():
    code = (
        "import sys, rlcore.cluster.ledger, rlcore.cluster.queue_host\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_dead_controller_is_an_error_within_the_deadline(ray_session, host):
    """Last in this file: afterwards the host has no queue."""
    queue = QueueClient(deadline_s=2)
    assert queue.partitions() == []
    controller = find_controller()
    assert controller is not None
    ray.kill(controller)
    ends = time.monotonic() + 20
    # Ray reports the death before the process is gone: until then it may answer.
    with pytest.raises(TransientError, match=r"its controller is gone|failed to list"):
        while time.monotonic() < ends:
            began = time.monotonic()
            queue.partitions()
            time.sleep(0.05)
    assert time.monotonic() - began < 5
    with pytest.raises(ActorUnavailableError, match="no TransferQueue on this Ray cluster"):
        queue.partitions()
