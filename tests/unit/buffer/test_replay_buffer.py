import pytest

from rlcore.buffer.ledger import Ledger
from rlcore.buffer.replay_buffer import ReplayBuffer
from rlcore.errors import DeadlineExceededError, RolloutError
from rlcore.testing.ledger import prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"


class InProcessLedger(Ledger):
    """The ledger with the actor's wait, where other actors' work happens at each look."""

    def __init__(self, *args, meanwhile, **options):
        super().__init__(*args, **options)
        self.meanwhile = meanwhile

    def wait_sample(self, key, partition_id, batch_size, deadline_s):
        assert deadline_s > 0
        for _ in range(10):
            batch = self.sample(key, partition_id, batch_size)
            if batch is not None or self.needs_refill(partition_id):
                return batch
            self.meanwhile(self)
        raise DeadlineExceededError("nobody works")


class FakeRows:
    """A queue that has lost some rows."""

    def __init__(self, lost=()):
        self.lost = set(lost)

    def incomplete(self, partition_id, keys, columns):
        assert partition_id == TRAIN
        assert "response_mask" in columns
        found = [key for key in keys if key in self.lost]
        self.lost.clear()
        return found


def key(step=1):
    return CallKey(run_id="run-1", attempt=1, global_step=step, phase="sample_batch")


def make_worker(fails=()):
    """Return a worker that runs one prompt a call; prompts in `fails` fail."""

    def work(ledger):
        for spec in ledger.claim(1, "w0", 1):
            failed = 1 if spec.uid in fails else 0
            ledger.settle("w0", spec.uid, sessions_of(spec.uid, num=2, num_failed=failed))

    return work


def make_buffer(tmp_path, uids, *, fails=(), lost=(), refill_fn=None):
    ledger = InProcessLedger(
        "run-1", tmp_path / "ledger.jsonl", 1, meanwhile=make_worker(fails), max_failure_ratio=0.9
    )
    ledger.feed(key(), [prompt_spec(uid) for uid in uids])
    buffer = ReplayBuffer(
        ledger, run_id="run-1", attempt=1, refill_fn=refill_fn, rows=FakeRows(lost)
    )
    return ledger, buffer


def test_sample_waits_for_a_batch_with_verls_arguments(tmp_path):
    _, buffer = make_buffer(tmp_path, ["a", "b", "c"])
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert (batch.uids, batch.global_step) == (["a", "b"], 1)
    assert metrics["rollout/refilled_prompts"] == 0
    assert metrics["rollout/num_trajectories"] == 4
    again, _ = buffer.sample(1, TRAIN, 2)
    assert again == batch


def test_failed_groups_are_refilled(tmp_path):
    asked = []

    def refill(count):
        asked.append(count)
        new = [f"r{len(asked)}x{i}" for i in range(count)]
        ledger.feed(key(), [prompt_spec(uid) for uid in new])

    ledger, buffer = make_buffer(tmp_path, ["a", "b"], fails=["a", "r1x0"], refill_fn=refill)
    batch, metrics = buffer.sample(1, "train", 2)
    assert batch.uids == ["b", "r2x0"]
    assert asked == [1, 1]
    assert metrics["rollout/refilled_prompts"] == 2
    assert ledger.counts(TRAIN)["failed"] == 2


def test_without_a_refill_a_failed_group_is_an_error(tmp_path):
    _, buffer = make_buffer(tmp_path, ["a", "b"], fails=["a"])
    with pytest.raises(RolloutError, match="1 groups of run-1/train failed and nothing refills"):
        buffer.sample(1, "train", 2)
    with pytest.raises(RolloutError, match="asked for 1 prompts and fed no new one"):
        buffer.sample(1, "train", 2, refill_fn=lambda count: None)


def test_groups_without_rows_are_run_again(tmp_path):
    ledger, buffer = make_buffer(tmp_path, ["a", "b", "c"], lost=["b_1_0"])
    batch, metrics = buffer.sample(1, "train", 2)
    # b was run again before c was ever claimed: pending prompts keep their order.
    assert batch.uids == ["a", "b"]
    assert metrics["rollout/returned_prompts"] == 1
    assert ledger.counts(TRAIN)["pending"] == 1


def test_the_deadline_is_for_the_whole_wait(tmp_path):
    _, buffer = make_buffer(tmp_path, ["a"])
    with pytest.raises(DeadlineExceededError, match="waited 0 s for 1 prompts of run-1/train"):
        buffer.sample(1, "train", 1, deadline_s=0)
