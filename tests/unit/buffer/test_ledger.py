import pytest

from rlcore.buffer.ledger import MAX_CLAIMS, Ledger
from rlcore.errors import CheckpointError, DataError, FencedError, TooManyFailuresError
from rlcore.testing.ledger import FakeClock, failed_session, good_session, prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"
VAL = "run-1/val"


def key(step=1, *, attempt=1, inner=0, phase="sample_batch", try_number=1, run_id="run-1"):
    return CallKey(
        run_id=run_id, attempt=attempt, global_step=step, inner_step=inner, phase=phase,
        try_number=try_number,
    )  # fmt: skip


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def ledger(tmp_path, clock):
    ledger = Ledger("run-1", tmp_path / "ledger.jsonl", 1, clock=clock, claim_lease_s=60)
    yield ledger
    ledger.check_conservation()
    ledger.close()


def run_prompts(ledger, uids, *, worker="w0", num_failed=0):
    """Claim everything pending and settle `uids`."""
    ledger.claim(1, worker, 100)
    for uid in uids:
        ledger.settle(worker, uid, sessions_of(uid, num=2, num_failed=num_failed))


def feed(ledger, uids, *, step=1, partition_id=TRAIN, validate=False):
    specs = [
        prompt_spec(uid, partition_id=partition_id, global_step=step, validate=validate)
        for uid in uids
    ]
    return ledger.feed(key(step, phase="add_batch_to_generate"), specs)


def test_a_prompt_goes_from_pending_to_trained(ledger):
    assert feed(ledger, ["a", "b"]) == 2
    [spec] = ledger.claim(1, "w0", 1)
    assert (spec.uid, spec.raw_prompt) == ("a", [{"role": "user", "content": "a?"}])
    assert ledger.settle("w0", "a", sessions_of("a", num=2)) == "finished"
    batch = ledger.sample(key(), TRAIN, 1)
    assert batch is not None
    assert batch.uids == ["a"]
    assert batch.keys == ["a_0_0", "a_1_0"]
    assert batch.tags[1] == {
        "prompt_len": 3, "response_len": 4, "uid": "a", "session_id": 1, "reward": 1.0,
        "reward_extra": {"acc": 1.0},
    }  # fmt: skip
    assert ledger.mark_trained(key(), 1) == ["a_0_0", "a_1_0"]
    counts = ledger.counts(TRAIN)
    assert (counts["fed"], counts["trained"], counts["pending"]) == (2, 1, 1)


def test_feeding_again_adds_nothing(ledger):
    feed(ledger, ["a", "b"])
    assert feed(ledger, ["a", "b", "c"]) == 1
    run_prompts(ledger, ["a", "b", "c"])
    ledger.sample(key(), TRAIN, 3)
    ledger.mark_trained(key(), 1)
    assert feed(ledger, ["a"]) == 0
    assert ledger.counts(TRAIN)["fed"] == 3


def test_a_bad_prompt_is_refused(ledger):
    for spec, message in (
        (prompt_spec("a_b"), "underscore"),
        (prompt_spec("a", partition_id="run-2/train"), "not one of run run-1"),
        (prompt_spec("a", num_sessions=0), "0 sessions"),
    ):
        with pytest.raises(DataError, match=message):
            ledger.feed(key(), [spec])
    feed(ledger, ["a"])
    with pytest.raises(DataError, match="mixes training and validation"):
        feed(ledger, ["b"], validate=True)
    with pytest.raises(DataError, match="plain values only"):
        ledger.feed(key(), [prompt_spec("c", fields={"entry": object()})])
    assert ledger.counts(TRAIN)["fed"] == 1


def test_sampling_again_returns_the_same_batch(ledger):
    feed(ledger, ["a", "b", "c", "d"])
    run_prompts(ledger, ["d", "b", "a"])
    first = ledger.sample(key(), TRAIN, 2)
    assert first is not None
    # Oldest first in the order of feeding, not of settling.
    assert first.uids == ["a", "b"]
    ledger.settle("w0", "c", sessions_of("c", num=2))
    assert ledger.sample(key(try_number=2), TRAIN, 2) == first
    assert ledger.leased(first.lease_id) == first
    other_inner = ledger.sample(key(inner=1), TRAIN, 2)
    assert other_inner is not None
    assert other_inner.uids == ["c", "d"]
    with pytest.raises(DataError, match="sampled with 2 prompts, now asked for 3"):
        ledger.sample(key(try_number=2), TRAIN, 3)


def test_older_dispatch_steps_go_first(ledger):
    feed(ledger, ["new"], step=2)
    feed(ledger, ["old"], step=1)
    assert [spec.uid for spec in ledger.claim(1, "w0", 2)] == ["old", "new"]
    for uid in ("new", "old"):
        ledger.settle("w0", uid, sessions_of(uid, num=2))
    batch = ledger.sample(key(2), TRAIN, 1)
    assert batch is not None
    assert batch.uids == ["old"]


def test_a_trained_step_cannot_be_sampled_again_and_its_release_can_be_repeated(ledger):
    feed(ledger, ["a", "b"])
    run_prompts(ledger, ["a", "b"])
    ledger.sample(key(), TRAIN, 1)
    assert ledger.mark_trained(key(), 1) == ["a_0_0", "a_1_0"]
    assert ledger.mark_trained(key(try_number=2), 1) == ["a_0_0", "a_1_0"]
    with pytest.raises(FencedError, match="trained and released"):
        ledger.sample(key(try_number=3), TRAIN, 1)
    with pytest.raises(DataError, match="no batch is leased as"):
        ledger.leased(f"{TRAIN}@1.0")
    with pytest.raises(DataError, match="no training batch is leased to step 2"):
        ledger.mark_trained(key(2), 2)


def test_a_lapsed_lease_returns_its_prompt(ledger, clock):
    feed(ledger, ["a", "b"])
    ledger.claim(1, "w0", 2)
    clock.advance(40)
    assert ledger.renew("w0", ["a"]) == []
    assert ledger.next_expiry_s() == 20
    clock.advance(30)
    assert ledger.expire() == ["b"]
    assert [spec.uid for spec in ledger.claim(1, "w1", 5)] == ["b"]
    assert ledger.renew("w0", ["a", "b"]) == ["b"]
    with pytest.raises(FencedError, match="leased to w1"):
        ledger.settle("w0", "b", sessions_of("b", num=2))
    assert ledger.settle("w1", "b", sessions_of("b", num=2)) == "finished"


def test_releasing_a_worker_returns_what_it_runs(ledger):
    feed(ledger, ["a", "b", "c"])
    ledger.claim(1, "w0", 1)
    ledger.claim(1, "w1", 2)
    assert ledger.release_worker("w1") == ["b", "c"]
    assert ledger.counts(TRAIN)["running"] == 1


def test_settling_again_returns_the_status(ledger):
    feed(ledger, ["a"])
    ledger.claim(1, "w0", 1)
    for _ in range(2):
        assert ledger.settle("w0", "a", sessions_of("a", num=2)) == "finished"


def test_settled_sessions_are_checked(ledger):
    feed(ledger, ["a"])
    ledger.claim(1, "w0", 1)
    good = good_session("a", 0)
    for sessions, message in (
        ([good], r"has 2 sessions, settled were \[0\]"),
        ([good, good], r"settled were \[0, 0\]"),
        ([good, good_session("b", 1)], "row keys of another"),
        ([good, good_session("a", 1, reward=float("nan"))], "no finite reward: nan"),
        ([good, good_session("a", 1, reward=None)], "no finite reward: None"),
        ([good, good_session("a", 1, keys=[], tags=[])], "neither rows nor an error"),
        ([good, good_session("a", 1, tags=[])], "1 keys and 0 tags"),
        ([good, failed_session(1, reward=0.0)], "failed and has a reward"),
    ):
        with pytest.raises(DataError, match=message):
            ledger.settle("w0", "a", sessions)
    with pytest.raises(DataError, match="never fed"):
        ledger.settle("w0", "z", [])
    assert ledger.counts(TRAIN)["running"] == 1


def test_failed_groups_are_given_up_and_replaced(ledger):
    feed(ledger, ["a", "b", "c"])
    run_prompts(ledger, ["b"])
    assert ledger.settle("w0", "a", sessions_of("a", num=2, num_failed=1)) == "failure"
    assert ledger.counts(TRAIN)["waiting"] == 2
    assert ledger.needs_refill(TRAIN) == 0
    assert ledger.sample(key(), TRAIN, 3) is None
    assert ledger.needs_refill(TRAIN) == 1
    # A repeat owes nothing more, and feeding known prompts pays nothing.
    assert ledger.sample(key(try_number=2), TRAIN, 3) is None
    feed(ledger, ["a"])
    assert ledger.needs_refill(TRAIN) == 1
    feed(ledger, ["d"])
    assert ledger.needs_refill(TRAIN) == 0
    run_prompts(ledger, ["c", "d"])
    batch = ledger.sample(key(try_number=2), TRAIN, 3)
    assert batch is not None
    assert batch.uids == ["b", "c", "d"]
    assert batch.metrics["rollout/failed_groups"] == 1
    assert batch.metrics["rollout/failed_sessions"] == 1
    assert batch.metrics["rollout/failure_ratio"] == 1 / 8
    assert batch.metrics["rollout/num_trajectories"] == 6
    assert ledger.counts(TRAIN)["failed"] == 1


def test_min_sessions_lets_a_group_be_incomplete(tmp_path):
    ledger = Ledger("run-1", tmp_path / "ledger.jsonl", 1, min_sessions=1)
    feed(ledger, ["a"])
    ledger.claim(1, "w0", 1)
    assert ledger.settle("w0", "a", sessions_of("a", num=2, num_failed=1)) == "finished"
    batch = ledger.sample(key(), TRAIN, 1)
    assert batch is not None
    # The failed session is the first one.
    assert batch.keys == ["a_1_0"]


def test_too_many_failed_sessions_fail_the_run(ledger):
    feed(ledger, ["a", "b", "c"])
    ledger.claim(1, "w0", 3)
    ledger.settle("w0", "a", sessions_of("a", num=2, num_failed=2))
    # One settled prompt is less than a batch: too early to tell.
    assert ledger.sample(key(), TRAIN, 2) is None
    ledger.settle("w0", "b", sessions_of("b", num=2, num_failed=1))
    with pytest.raises(TooManyFailuresError, match=r"3 of 4 .* 0\.75.*row 7: ValueError: no"):
        ledger.sample(key(), TRAIN, 2)


def test_validation_groups_are_never_given_up(ledger):
    feed(ledger, ["a", "b"], partition_id=VAL, validate=True, step=5)
    assert ledger.settled(VAL) is None
    run_prompts(ledger, ["b"], num_failed=0)
    assert ledger.settle("w0", "a", sessions_of("a", num=2, num_failed=2)) == "failure"
    settled = ledger.settled(VAL)
    assert settled is not None
    assert [(uid, [s.reward for s in found]) for uid, found in settled.items()] == [
        ("a", [None, None]),
        ("b", [1.0, 1.0]),
    ]
    batch = ledger.sample(key(5), VAL, 2)
    assert batch is not None
    assert (batch.uids, batch.keys) == (["a", "b"], ["b_0_0", "b_1_0"])
    assert ledger.needs_refill(VAL) == 0
    # Not a training batch: nothing to mark.
    with pytest.raises(DataError, match="no training batch"):
        ledger.mark_trained(key(5), 5)


def test_a_discarded_validation_can_be_run_again(ledger):
    for _ in range(2):
        feed(ledger, ["a", "b"], partition_id=VAL, validate=True)
        run_prompts(ledger, ["a"])
        assert ledger.discard(key(), VAL) == ["a_0_0", "a_1_0"]
    counts = ledger.counts(VAL)
    assert (counts["fed"], counts["discarded"], counts["running"]) == (4, 4, 0)
    with pytest.raises(FencedError, match="is discarded"):
        ledger.settle("w0", "b", sessions_of("b", num=2))
    feed(ledger, ["t"])
    ledger.discard(key(), TRAIN)
    assert feed(ledger, ["t"]) == 0


def test_lost_rows_send_groups_back_and_dissolve_their_batch(ledger):
    feed(ledger, ["a", "b", "c"])
    run_prompts(ledger, ["a", "b"])
    assert ledger.waiting_rows(TRAIN) == {"a": ["a_0_0", "a_1_0"], "b": ["b_0_0", "b_1_0"]}
    ledger.sample(key(), TRAIN, 2)
    ledger.return_to_pending(key(), ["b", "c"])
    counts = ledger.counts(TRAIN)
    assert (counts["finished"], counts["pending"], counts["running"]) == (1, 1, 1)
    run_prompts(ledger, ["b"], worker="w1")
    batch = ledger.sample(key(), TRAIN, 2)
    assert batch is not None
    assert batch.uids == ["a", "b"]
    ledger.mark_trained(key(), 1)
    with pytest.raises(DataError, match="a cannot be run again: it is trained"):
        ledger.return_to_pending(key(), ["a"])


def test_a_prompt_that_loses_its_workers_is_quarantined(ledger, clock):
    feed(ledger, ["a"])
    for i in range(MAX_CLAIMS):
        assert [spec.uid for spec in ledger.claim(1, f"w{i}", 1)] == ["a"]
        clock.advance(61)
    assert ledger.claim(1, "w9", 1) == []
    assert ledger.counts(TRAIN)["failure"] == 1
    with pytest.raises(TooManyFailuresError, match="Quarantined: claimed 5 times"):
        ledger.sample(key(), TRAIN, 1)


def test_claims_of_workers_that_ended_for_another_reason_do_not_count(ledger):
    feed(ledger, ["a"])
    for i in range(2 * MAX_CLAIMS):
        assert [spec.uid for spec in ledger.claim(1, f"w{i}", 1)] == ["a"]
        assert ledger.release_worker(f"w{i}", is_blameless=True) == ["a"]
    for i in range(MAX_CLAIMS):
        assert [spec.uid for spec in ledger.claim(1, f"v{i}", 1)] == ["a"]
        ledger.release_worker(f"v{i}")
    assert ledger.counts(TRAIN)["failure"] == 1


def test_a_new_attempt_fences_the_old_one(ledger):
    feed(ledger, ["a", "b"])
    ledger.claim(1, "w0", 2)
    ledger.settle("w0", "a", sessions_of("a", num=2))
    ledger.fence(2)
    assert ledger.counts(TRAIN)["pending"] == 1
    assert ledger.next_expiry_s() is None
    for call in (
        lambda: ledger.feed(key(), []),
        lambda: ledger.claim(1, "w0", 1),
        lambda: ledger.sample(key(), TRAIN, 1),
        lambda: ledger.mark_trained(key(), 1),
        lambda: ledger.discard(key(), TRAIN),
        lambda: ledger.return_to_pending(key(), ["a"]),
        lambda: ledger.load_state_dict(key(), ledger.state_dict()),
        lambda: ledger.fence(1),
        lambda: ledger.settle("w0", "b", sessions_of("b", num=2)),
        lambda: ledger.sample(key(run_id="run-2"), TRAIN, 1),
    ):
        with pytest.raises(FencedError):
            call()
    batch = ledger.sample(key(attempt=2, try_number=2), TRAIN, 1)
    assert batch is not None
    with pytest.raises(FencedError, match="try 2 of this phase has been seen"):
        ledger.sample(key(attempt=2), TRAIN, 1)


def test_overdue_names_uid_state_age_and_owner(ledger, clock):
    feed(ledger, ["a", "b"])
    ledger.claim(1, "w0", 1)
    clock.advance(12.5)
    assert ledger.overdue(TRAIN) == [
        "a (step 1): running for 12.5 s, owner w0, 2 sessions",
        "b (step 1): pending for 12.5 s, no owner, 2 sessions",
    ]


def test_a_saved_state_holds_no_lease_of_the_released_step(tmp_path, ledger):
    feed(ledger, ["a", "b", "c"])
    feed(ledger, ["v"], partition_id=VAL, validate=True)
    run_prompts(ledger, ["a", "v"])
    ledger.sample(key(), TRAIN, 1)
    ledger.sample(key(), VAL, 1)
    saved = ledger.state_dict(released_step=1)
    assert saved["leases"] == []
    # The living ledger has not changed.
    assert ledger.counts(TRAIN)["sampled"] == 1
    other = Ledger("run-1", tmp_path / "other.jsonl", 2)
    other.load_state_dict(key(attempt=2), saved)
    other.check_conservation()
    counts = other.counts(TRAIN)
    # What was running is pending: its worker belonged to the other process.
    assert (counts["fed"], counts["trained"], counts["pending"]) == (3, 1, 2)
    assert other.counts(VAL)["discarded"] == 1
    assert other.attempt == 2
    assert other.mark_trained(key(attempt=2), 1) == ["a_0_0", "a_1_0"]
    stranger = Ledger("run-2", tmp_path / "stranger.jsonl", 1)
    with pytest.raises(FencedError, match="ledger of run run-1 was refused by run-2"):
        stranger.load_state_dict(key(run_id="run-2"), saved)


def test_recovery_rebuilds_the_state_and_gives_fresh_leases(tmp_path, ledger, clock):
    feed(ledger, ["a", "b", "c"])
    ledger.claim(1, "w0", 2)
    ledger.settle("w0", "a", sessions_of("a", num=2))
    batch = ledger.sample(key(), TRAIN, 1)
    with pytest.raises(CheckpointError, match="still alive"):
        Ledger.recover(ledger._journal.path)
    ledger.close()
    clock.advance(1000)
    recovered = Ledger.recover(tmp_path / "ledger.jsonl", clock=clock, claim_lease_s=60)
    assert recovered.state_dict() == ledger.state_dict()
    assert recovered.sample(key(), TRAIN, 1) == batch
    assert recovered.next_expiry_s() == 60
    assert recovered.settle("w0", "b", sessions_of("b", num=2)) == "finished"
    recovered.close()
    assert Ledger.recover(tmp_path / "ledger.jsonl").state_dict() == recovered.state_dict()


def test_a_full_disk_changes_nothing(ledger):
    feed(ledger, ["a"])
    ledger.close()
    with pytest.raises(ValueError, match="closed file"):
        ledger.claim(1, "w0", 1)
    assert ledger.counts(TRAIN)["pending"] == 1


def test_a_loaded_state_forgets_the_leases_of_the_replaced_one(ledger, clock):
    feed(ledger, ["a"])
    saved = ledger.state_dict()
    ledger.claim(1, "w0", 1)
    ledger.load_state_dict(key(), saved)
    clock.advance(100)
    assert ledger.expire() == []
    assert ledger.next_expiry_s() is None
