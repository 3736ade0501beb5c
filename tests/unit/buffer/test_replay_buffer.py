import pytest

from rlcore.buffer.replay_buffer import ReplayBuffer
from rlcore.errors import DataError, DeadlineExceededError, RolloutError
from rlcore.testing.ledger import prompt_spec, sessions_of
from rlcore.testing.sampling import FakeRows, InProcessLedger
from rlcore.types import CallKey

TRAIN = "run-1/train"


def key(step=1):
    return CallKey(run_id="run-1", attempt=1, global_step=step, phase="sample_batch")


def make_worker(fails=()):
    """Return a worker that runs one prompt a call; prompts in `fails` fail."""

    def work(ledger):
        for spec in ledger.claim(1, "w0", 1):
            failed = 1 if spec.uid in fails else 0
            ledger.settle("w0", spec.uid, sessions_of(spec.uid, num=2, num_failed=failed))

    return work


def make_buffer(tmp_path, uids, *, fails=(), lost=(), refill_fn=None, buffer_class=ReplayBuffer):
    ledger = InProcessLedger(
        "run-1", tmp_path / "ledger.jsonl", 1, meanwhile=make_worker(fails), max_failure_ratio=0.9
    )
    ledger.feed(key(), [prompt_spec(uid) for uid in uids])
    buffer = buffer_class(
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
    with pytest.raises(RolloutError, match=r"1 groups of .* failed or were evicted and no"):
        buffer.sample(1, "train", 2)
    with pytest.raises(RolloutError, match="asked for 1 prompts and fed no new one"):
        buffer.sample(1, "train", 2, refill_fn=lambda count: None)


def test_a_group_that_fails_while_another_is_refilled_is_refilled_too(tmp_path):
    work = make_worker(fails=["a", "b"])
    asked = []

    def refill(count):
        asked.append(count)
        ledger.feed(key(), [prompt_spec(f"r{len(asked)}x{i}") for i in range(count)])
        work(ledger)  # b fails now: as many are owed as before

    ledger, buffer = make_buffer(tmp_path, ["a", "b"], fails=["a", "b"], refill_fn=refill)
    batch, _ = buffer.sample(1, "train", 2)
    assert asked == [1, 1]
    assert batch.uids == ["r1x0", "r2x0"]


class Everything:
    def __contains__(self, item):
        return True


def test_prompts_of_quarantined_rows_alone_end_the_wait(tmp_path):
    fed = []

    def refill(count):
        new = [f"r{len(fed) + i}" for i in range(count)]
        fed.extend(new)
        ledger.feed(key(), [prompt_spec(uid, index=7) for uid in new])

    ledger, buffer = make_buffer(tmp_path, [], fails=Everything(), refill_fn=refill)
    ledger.feed(key(), [prompt_spec("a", index=7)])
    with pytest.raises(RolloutError, match=r"the last 1000 prompts .* are of rows .* quarantined"):
        buffer.sample(1, "train", 1)
    # Row 7 was run three times; the others of it were not.
    assert len(fed) == 2 + 1000


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


class Hardest(ReplayBuffer):
    """Sees twice the batch and returns the later half."""

    def sample(self, global_steps, partition_id, batch_size):
        batch, metrics = super().sample(global_steps, partition_id, 2 * batch_size)
        chosen = batch.uids[batch_size:]
        keys = [key for key in batch.keys if key.split("_")[0] in chosen]
        return KVBatchMeta(keys), {**metrics, "mine": 1.0}


class KVBatchMeta:
    """As the queue's package has it: a sampler written for verl returns one."""

    def __init__(self, keys):
        self.keys = keys


def draw(buffer, size=2, **options):
    return buffer.draw(key(), "train", size, deadline_s=10, **options)


def test_what_a_custom_sampler_returns_is_leased_and_what_it_left_stays(tmp_path):
    ledger, buffer = make_buffer(tmp_path, ["a", "b", "c", "d"], buffer_class=Hardest)
    batch, metrics = draw(buffer)
    assert (batch.uids, metrics["mine"]) == (["c", "d"], 1.0)
    assert batch.lease_id == "run-1/train@1.0"
    counts = ledger.counts(TRAIN)
    assert (counts["sampled"], counts["finished"]) == (2, 2)
    # A second try gets the same batch without asking the sampler again.
    again, metrics = draw(buffer)
    assert again == batch
    assert "mine" not in metrics
    ledger.mark_trained(key(), 1)
    assert ledger.waiting_rows(TRAIN).keys() == {"a", "b"}


def test_a_sampler_that_only_passes_on_gets_the_oldest(tmp_path):
    class PassesOn(ReplayBuffer):
        def sample(self, global_steps, partition_id, batch_size):
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            return batch, metrics

    ledger, buffer = make_buffer(tmp_path, ["a", "b", "c"], lost=["b_1_0"], buffer_class=PassesOn)
    batch, metrics = draw(buffer)
    assert batch.uids == ["a", "b"]
    assert metrics["rollout/returned_prompts"] == 1
    assert ledger.leased(batch.lease_id) == batch


def test_the_views_have_verls_names_and_cannot_be_changed(tmp_path):
    ledger, buffer = make_buffer(tmp_path, ["a", "b", "c"])
    make_worker()(ledger)
    [spec] = ledger.claim(1, "w1", 1)
    assert buffer.pending_keys["train"] == ("c",)
    assert buffer.running_keys["train"] == (spec.uid,) == ("b",)
    assert buffer.finished_keys["train"] == ("a",)
    assert buffer.failure_keys["train"] == ()
    tags = buffer.partitions["train"]
    assert list(tags) == ["a_0_0", "a_1_0"]
    assert (tags["a_0_0"]["uid"], tags["a_0_0"]["reward"]) == ("a", 1.0)
    for change in (
        lambda: tags.update(x=1),
        lambda: buffer.finished_keys["train"].append("b"),
        lambda: buffer.finished_keys.clear(),
        lambda: setattr(buffer, "finished_keys", {}),
    ):
        with pytest.raises(AttributeError):
            change()
    # As verl's: they stay as they were until the next synchronisation.
    ledger.settle("w1", "b", sessions_of("b", num=2))
    assert buffer.finished_keys["train"] == ("a",)
    buffer._sync_metadata_from_transfer_queue()
    assert buffer.finished_keys["train"] == ("a", "b")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a_0_0": 1}, "returned dict; it must return"),
        (KVBatchMeta(["a_0_0", "a_1_0"]), "returned 1 groups, asked for 2"),
        (KVBatchMeta(["a_0_0", "b_0_0", "b_1_0"]), r"left out rows .*a_1_0"),
        (KVBatchMeta(["a_0_0", "a_1_0", "z_0_0"]), "leases prompt z, which was never fed"),
        (KVBatchMeta(["a_0_0", "a_1_0", "c_0_0"]), "leases prompt c, which is pending"),
    ],
)
def test_a_custom_sampler_that_returns_no_batch_is_told_so(tmp_path, returned, message):
    class Wrong(ReplayBuffer):
        def sample(self, global_steps, partition_id, batch_size):
            return returned, {}

    ledger, buffer = make_buffer(tmp_path, ["a", "b", "c"], buffer_class=Wrong)
    for _ in range(2):
        make_worker()(ledger)
    with pytest.raises(DataError, match=message):
        draw(buffer)
    assert ledger.counts(TRAIN)["finished"] == 2


def test_unknown_arguments_are_refused(tmp_path):
    with pytest.raises(DataError, match="ReplayBuffer takes no pol, thresh"):
        ReplayBuffer(None, run_id="r", attempt=1, pol=1, thresh=2)
