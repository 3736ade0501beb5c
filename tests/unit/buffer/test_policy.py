"""verl's scenarios for its replay buffer and for reissue, on the ledger (see its state machine)."""

from dataclasses import replace

import pytest

from rlcore.buffer.ledger import Ledger
from rlcore.buffer.ledger_state import MAX_ROW_FAILURES
from rlcore.buffer.policy import SamplePolicy, num_admitted, num_updates
from rlcore.buffer.prompt_queue import PromptQueue
from rlcore.errors import DataError, RolloutError
from rlcore.testing.ledger import good_session, prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"
VAL = "run-1/val"
DROP = SamplePolicy(max_off_policy_threshold=8, keeps_supply=True)


def key(step, inner=0):
    return CallKey(run_id="run-1", attempt=1, global_step=step, inner_step=inner)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger("run-1", tmp_path / "ledger.jsonl", 1, max_failure_ratio=1.0)
    yield ledger
    ledger.check_conservation()


def feed(ledger, uids, *, step=1, **changes):
    return ledger.feed(key(step), [prompt_spec(uid, global_step=step, **changes) for uid in uids])


def settle(ledger, uids, *, rewards=(1.0, 0.0), version=None, worker="w0", **extra):
    """Run `uids`, two sessions each; whatever else is pending is claimed too."""
    ledger.claim(1, worker, 1000)
    for uid in uids:
        sessions = []
        for i, reward in enumerate(rewards):
            tag = {"prompt_len": 1, "response_len": 10}
            if version is not None:
                tag["min_global_steps"] = version
            values = {name: found[i] for name, found in extra.items()}
            sessions.append(
                good_session(uid, i, tags=[tag], reward=reward, reward_extra={**values})
            )
        ledger.settle(worker, uid, sessions)


def uids_of(batch):
    return None if batch is None else batch.uids


def test_step_9_with_threshold_8_drops_step_1_keeps_step_2_and_owes_one(ledger):
    feed(ledger, ["one"], step=1)
    feed(ledger, ["two"], step=2)
    settle(ledger, ["one", "two"])
    assert ledger.sample(key(9), TRAIN, 1, DROP) is None
    assert ledger.needs_refill(TRAIN, DROP) == 1
    feed(ledger, ["new"], step=9)
    batch = ledger.sample(key(9), TRAIN, 1, DROP)
    assert uids_of(batch) == ["two"]
    counts = ledger.counts(TRAIN)
    assert (counts["stale"], counts["sampled"], counts["pending"]) == (1, 1, 1)
    prefix = "training/off_policy/evicted"
    assert batch.metrics[f"{prefix}_samples"] == 1
    assert batch.metrics[f"{prefix}_tokens"] == 20
    # Span 9 is a staleness of 8.
    assert batch.metrics[f"{prefix}_samples_staleness/max"] == 8
    # The rows of the evicted group go with those of the step.
    assert ledger.mark_trained(key(9), 9) == ["two_0_0", "two_1_0", "one_0_0", "one_1_0"]


def test_in_flight_prompts_are_never_dropped(ledger):
    feed(ledger, ["old", "older"], step=1)
    ledger.claim(1, "w0", 1)
    assert ledger.sample(key(20), TRAIN, 1, DROP) is None
    counts = ledger.counts(TRAIN)
    assert (counts["running"], counts["pending"], counts["stale"]) == (1, 1, 0)


def test_without_a_threshold_and_in_validation_nothing_is_stale(ledger):
    feed(ledger, ["a"], step=1)
    feed(ledger, ["v"], step=1, partition_id=VAL, validate=True)
    settle(ledger, ["a", "v"], rewards=(1.0, 1.0))
    strict = SamplePolicy(max_off_policy_threshold=1, filter_metric="reward")
    assert uids_of(ledger.sample(key(50), VAL, 1, strict)) == ["v"]
    assert uids_of(ledger.sample(key(50), TRAIN, 1, SamplePolicy())) == ["a"]


def test_wait_holds_the_batch_back_for_what_would_be_too_late_and_drops_nothing(ledger):
    policy = SamplePolicy(max_off_policy_threshold=2, strategy="wait", keeps_supply=True)
    feed(ledger, ["a", "b"], step=1)
    feed(ledger, ["c"], step=2)
    settle(ledger, ["b", "c"])
    # At step 2 "a" spans 2 already: it must not be passed over.
    assert ledger.sample(key(2), TRAIN, 1, policy) is None
    assert ledger.needs_refill(TRAIN, policy) == 0
    settle(ledger, ["a"])
    assert uids_of(ledger.sample(key(2), TRAIN, 1, policy)) == ["a"]
    # "b" is too old at step 3, and is trained all the same.
    ledger.mark_trained(key(2), 2)
    assert uids_of(ledger.sample(key(3), TRAIN, 1, policy)) == ["b"]


def test_wait_looks_ahead_where_verl_does_not(ledger):
    """Three prompts due at step 3, one batch a step: passing over them at step 2 is too late."""
    policy = SamplePolicy(max_off_policy_threshold=3, strategy="wait")
    feed(ledger, ["a", "b", "c"], step=1)
    settle(ledger, ["c"])
    assert uids_of(ledger.sample(key(1), TRAIN, 1, policy)) == ["c"]
    ledger.mark_trained(key(1), 1)
    feed(ledger, ["d"], step=2)
    ledger.claim(1, "w0", 10)
    settle(ledger, ["d"])
    # Taking "d" would leave two prompts for step 3, which takes one.
    assert ledger.sample(key(2), TRAIN, 1, policy) is None
    settle(ledger, ["b"])
    assert uids_of(ledger.sample(key(2), TRAIN, 1, policy)) == ["b"]


def test_tokens_are_the_other_basis(ledger):
    policy = SamplePolicy(
        max_off_policy_threshold=2, basis="tokens", trainer_version=5, keeps_supply=True
    )
    feed(ledger, ["a", "b", "c"], step=1)
    settle(ledger, ["a"], version=3)
    settle(ledger, ["b"], version=4)
    settle(ledger, ["c"], version=5)
    # All were dispatched long ago; versions 4 and 5 span 2 and 1, version 3 spans 3.
    assert ledger.sample(key(6), TRAIN, 1, policy) is None
    assert ledger.counts(TRAIN)["stale"] == 1
    feed(ledger, ["d"], step=6)
    assert uids_of(ledger.sample(key(6), TRAIN, 2, policy)) == ["b", "c"]


def test_numbers_of_a_dead_attempt_do_not_make_tokens_older(ledger):
    # Version 2 was saved; 3 and 4 were the dead attempt's; this one went on with 5 and 6.
    policy = SamplePolicy(
        max_off_policy_threshold=2, basis="tokens", trainer_version=6, skipped_versions=(3, 4),
        keeps_supply=True,
    )  # fmt: skip
    feed(ledger, ["a", "b"], step=1)
    settle(ledger, ["a"], version=2)
    settle(ledger, ["b"], version=5)
    # Two updates lie between 2 and 6: "a" spans 3.
    assert ledger.sample(key(3), TRAIN, 2, policy) is None
    assert ledger.counts(TRAIN)["stale"] == 1
    just_resumed = replace(policy, trainer_version=5)
    feed(ledger, ["c"], step=3)
    settle(ledger, ["c"], version=2)
    assert uids_of(ledger.sample(key(3), TRAIN, 2, just_resumed)) == ["b", "c"]


@pytest.mark.parametrize(
    ("older", "newer", "skipped", "updates"),
    [(2, 6, (), 4), (2, 6, (3, 4), 2), (5, 6, (3, 4), 1), (2, 2, (3, 4), 0), (2, 6, (1, 7), 4)],
)
def test_updates_between_two_versions(older, newer, skipped, updates):
    assert num_updates(older, newer, skipped) == updates


def test_pace_admits_what_can_still_be_fresh():
    pace = SamplePolicy(max_off_policy_threshold=3, strategy="pace")
    assert num_admitted(4, outstanding=8, per_step=4, policy=pace) == 4
    assert num_admitted(4, outstanding=10, per_step=4, policy=pace) == 2
    assert num_admitted(4, outstanding=16, per_step=4, policy=pace) == 0
    drop = SamplePolicy(max_off_policy_threshold=3)
    assert num_admitted(4, outstanding=16, per_step=4, policy=drop) == 4


@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_groups_without_differences_are_filtered_and_replaced_one_for_one(ledger, metric):
    policy = SamplePolicy(filter_metric=metric, keeps_supply=True)
    feed(ledger, ["same", "differ", "more"])
    equal = {"rewards": (1.0, 1.0), "acc": (1.0, 0.0)}
    if metric == "acc":
        equal = {"rewards": (1.0, 0.0), "acc": (1.0, 1.0)}
    settle(ledger, ["same"], **equal)
    settle(ledger, ["differ"], rewards=(0.0, 1.0), acc=(0.0, 1.0))
    assert ledger.sample(key(1), TRAIN, 1, policy) is None
    assert ledger.needs_refill(TRAIN, policy) == 1
    feed(ledger, ["x"])
    batch = ledger.sample(key(1), TRAIN, 1, policy)
    assert uids_of(batch) == ["differ"]
    assert batch.metrics["training/off_policy/filter_groups/evicted_samples"] == 1
    assert ledger.counts(TRAIN)["filtered"] == 1


def test_a_missing_filter_metric_is_named(ledger):
    feed(ledger, ["a"])
    settle(ledger, ["a"], acc=(1.0, 0.0), length=(3.0, 4.0))
    with pytest.raises(DataError, match=r"prompt a, session 0: .* no 'accuracy'.*acc, length"):
        ledger.sample(key(1), TRAIN, 1, SamplePolicy(filter_metric="accuracy"))


def test_sync_filter_refills_twice_within_the_limit_and_drops_the_surplus(ledger):
    policy = SamplePolicy(
        filter_metric="reward", refill_factor=2, max_in_flight=4, discards_surplus=True
    )
    feed(ledger, ["a", "b", "c", "d"])
    settle(ledger, ["a", "b", "c"], rewards=(1.0, 1.0))
    assert ledger.sample(key(1), TRAIN, 4, policy) is None
    # 6 are owed, 1 is still running, 4 may be in flight.
    assert ledger.needs_refill(TRAIN, policy) == 3
    feed(ledger, ["e", "f", "g"])
    assert ledger.needs_refill(TRAIN, policy) == 0
    settle(ledger, ["d", "e"])
    assert ledger.sample(key(1), TRAIN, 4, policy) is None
    assert ledger.needs_refill(TRAIN, policy) == 2
    feed(ledger, ["h", "i"])
    ledger.claim(1, "w0", 9)
    settle(ledger, ["f", "g", "h"])
    # Five are there; what is in flight is let finish, so that the choice depends on no race.
    assert ledger.sample(key(1), TRAIN, 4, policy) is None
    settle(ledger, ["i"])
    batch = ledger.sample(key(1), TRAIN, 4, policy)
    assert uids_of(batch) == ["d", "e", "f", "g"]
    assert ledger.counts(TRAIN)["discarded"] == 2
    assert ledger.needs_refill(TRAIN, policy) == 0
    cleared = ledger.mark_trained(key(1), 1)
    assert {k.split("_")[0] for k in cleared} == set("abcdefghi")


def test_sync_filter_stops_feeding_when_a_step_is_finished_however_much_is_owed(ledger):
    """Two are fed per filtered group: with more than half filtered the debt only grows."""
    policy = SamplePolicy(
        filter_metric="reward",
        refill_factor=2,
        max_in_flight=2,
        discards_surplus=True,
        prompts_per_step=2,
    )
    feed(ledger, ["a", "b"])
    settle(ledger, ["a", "b"], rewards=(1.0, 1.0))
    assert ledger.sample(key(1), TRAIN, 2, policy) is None
    for name in "cdefgh":  # every third group differs
        assert ledger.needs_refill(TRAIN, policy) == 2
        feed(ledger, [name])
        ledger.claim(1, "w0", 1)
        settle(ledger, [name], rewards=(1.0, 0.0 if name in "eh" else 1.0))
        batch = ledger.sample(key(1), TRAIN, 2, policy)
    # a and b owe four, c, d, f and g eight more; six were fed.
    assert uids_of(batch) == ["e", "h"]
    assert ledger.needs_refill(TRAIN, policy) == 0


def test_stale_failed_and_filtered_groups_are_replaced_once(ledger):
    policy = SamplePolicy(max_off_policy_threshold=1, filter_metric="reward", keeps_supply=True)
    feed(ledger, ["stale-and-equal", "failed"], step=1)
    feed(ledger, ["equal"], step=2)
    ledger.claim(1, "w0", 9)
    settle(ledger, ["stale-and-equal", "equal"], rewards=(0.0, 0.0))
    ledger.settle("w0", "failed", sessions_of("failed", num=2, num_failed=1))
    assert ledger.sample(key(2), TRAIN, 1, policy) is None
    counts = ledger.counts(TRAIN)
    assert (counts["stale"], counts["filtered"], counts["failed"]) == (1, 1, 1)
    assert ledger.needs_refill(TRAIN, policy) == 3


def test_a_row_that_fails_again_and_again_is_quarantined(ledger):
    for epoch in range(MAX_ROW_FAILURES + 1):
        step = epoch + 1
        feed(ledger, [f"bad{epoch}"], step=step, index=5)
        claimed = ledger.claim(1, "w0", 9)
        if epoch < MAX_ROW_FAILURES:
            assert [spec.index for spec in claimed] == [5]
            uid = f"bad{epoch}"
            ledger.settle("w0", uid, sessions_of(uid, num=2, num_failed=2))
            assert ledger.sample(key(step), TRAIN, 1) is None
        else:
            assert claimed == []
    counts = ledger.counts(TRAIN)
    assert (counts["fed"], counts["failed"]) == (MAX_ROW_FAILURES + 1, MAX_ROW_FAILURES + 1)
    # Each feed replaced the one before; the quarantined one is owed as well.
    assert ledger.needs_refill(TRAIN) == 1


def test_reissue_after_a_restart_gives_in_flight_prompts_the_new_step(ledger, tmp_path):
    feed(ledger, ["a", "b", "c", "d"], step=1)
    ledger.claim(1, "w0", 3)
    for uid in ("a", "b"):
        ledger.settle("w0", uid, sessions_of(uid, num=2))
    ledger.sample(key(1), TRAIN, 1)
    saved = ledger.state_dict(released_step=1)
    restored = Ledger("run-1", tmp_path / "second.jsonl", 2)
    restored.load_state_dict(
        CallKey(run_id="run-1", attempt=2, global_step=0, phase="restore"), saved
    )
    assert restored.counts(TRAIN)["finished"] == 1
    # Not before the weights are published, after which every mode feeds.
    assert restored.claim(2, "w1", 9) == []
    restored.feed(CallKey(run_id="run-1", attempt=2, global_step=2, phase="warm_up"), [])
    claimed = restored.claim(2, "w1", 9)
    # c was running, d pending: each once, in the old order, dispatched by step 2.
    assert [(spec.uid, spec.global_step) for spec in claimed] == [("c", 2), ("d", 2)]
    assert restored.waiting_rows(TRAIN) == {"b": ["b_0_0", "b_1_0"]}
    restored.check_conservation()


def test_a_full_queue_holds_claims_back_and_says_so_when_it_can_make_no_batch(tmp_path):
    ledger = Ledger("run-1", tmp_path / "l.jsonl", 1, capacity=6)
    feed(ledger, ["a", "b", "c", "d"])
    # Two rows each: three prompts fit.
    assert [spec.uid for spec in ledger.claim(1, "w0", 9)] == ["a", "b", "c"]
    settle(ledger, ["a", "b"])
    assert ledger.claim(1, "w0", 9) == []
    assert uids_of(ledger.sample(key(1), TRAIN, 2)) == ["a", "b"]
    assert ledger.claim(1, "w0", 9) == []
    ledger.mark_trained(key(1), 1)
    assert [spec.uid for spec in ledger.claim(1, "w0", 9)] == ["d"]
    settle(ledger, ["c", "d"])
    feed(ledger, ["e", "f"], step=2)
    ledger.claim(1, "w0", 9)
    settle(ledger, ["e"])
    with pytest.raises(RolloutError, match=r"full: 6 of 6 rows .*total_storage_size.*no 4 fini"):
        ledger.sample(key(2), TRAIN, 4)


def test_memory_and_checkpoints_stay_flat(ledger):
    sizes = []
    for step in range(1, 41):
        uids = [f"s{step}p{i}" for i in range(4)]
        feed(ledger, uids, step=step)
        settle(ledger, uids)
        ledger.sample(key(step), TRAIN, 4)
        ledger.mark_trained(key(step), step)
        sizes.append(len(str(ledger.state_dict())))
        # What was trained long ago cannot come back.
        assert ledger.feed(key(step), [prompt_spec("s1p0", global_step=1)]) == 0
    assert max(sizes[20:]) < 1.05 * max(sizes[2:10])
    assert ledger.counts(TRAIN)["trained"] == ledger.counts(TRAIN)["fed"] == 160


def test_the_queue_of_prompts_is_in_order_whatever_comes_and_goes():
    class P:
        def __init__(self, uid, step, order):
            self.uid, self.global_step, self.order = uid, step, order

    queue = PromptQueue()
    prompts = [P(f"p{i}", (i * 7) % 5, i) for i in range(200)]
    for prompt in prompts:
        queue.add(prompt)
    for prompt in prompts[::2]:
        queue.remove(prompt.uid)
    for prompt in prompts[:100:4]:
        queue.add(prompt)
    expected = sorted(prompts[1::2] + prompts[:100:4], key=lambda p: (p.global_step, p.order))
    assert queue.in_order() == expected
    assert queue.first(7) == queue.first(7) == expected[:7]
    assert sum(queue.by_step.values()) == len(queue) == len(expected)
