"""When a replica is lost."""

from typing import Any

from rlcore.errors import ActorUnavailableError, DeadlineExceededError
from rlcore.rollout.health import HealthLimits, Losses, ReplicaHealth


def report(**changes: Any) -> dict[str, Any]:
    return {
        "state": "ready", "error": "", "loading_version": None, "in_flight": 3,
        "last_step_age_s": 0.1, "requests": ["a-0-0"],
    } | changes  # fmt: skip


def health() -> ReplicaHealth:
    return ReplicaHealth("r", HealthLimits(max_misses=2, hang_s=60))


def test_an_answer_is_a_sign_of_life_unless_it_says_dead_or_the_engine_hangs():
    assert health().answered(report()) == ""
    assert health().answered(report(state="dead", error="boom")) == "r is dead: boom"
    hung = health().answered(report(last_step_age_s=61.0))
    assert hung == "r hangs: 3 requests run and the last step was 61 s ago"


def test_who_holds_still_for_a_reason_does_not_hang():
    for changes in ({"in_flight": 0}, {"state": "paused"}, {"loading_version": 4}):
        assert health().answered(report(last_step_age_s=1e4, **changes)) == ""


def test_misses_in_a_row_count_and_a_death_counts_at_once():
    one = health()
    assert one.missed(DeadlineExceededError("slow")) == ""
    assert one.answered(report()) == ""
    assert one.missed(DeadlineExceededError("slow")) == ""
    assert one.missed(DeadlineExceededError("slow")) == "r did not answer 2 times: slow"
    assert health().missed(ActorUnavailableError("gone")) == "r died: gone"


def test_a_request_that_loses_every_replica_that_it_meets_is_named():
    losses = Losses(HealthLimits(max_losses_of_a_request=3))
    assert losses.add("r0", "it died", ["bad-0", "early-0"], served_s=500) == ""
    assert losses.add("r0", "it died", ["late-0"], served_s=500) == ""
    assert losses.add("r1", "it died", ["late-1", "bad-1"], served_s=500) == ""
    hopeless = losses.add("r0", "r0 hangs", ["bad-2"], served_s=500)
    assert hopeless == "r0, r1, r0 were lost while request bad ran; the last: r0 hangs"


def test_short_lives_in_a_row_end_it_and_a_long_one_begins_anew():
    losses = Losses(HealthLimits(max_short_lives=2, healthy_s=60))
    assert losses.add("r0", "it died", [], served_s=5) == ""
    assert losses.add("r1", "it died", [], served_s=5) == ""
    assert losses.add("r0", "it died", [], served_s=61) == ""
    assert losses.add("r0", "it died", ["c-0"], served_s=5) == ""
    assert losses.add("r0", "it died", ["b-0", "a-0"], served_s=59) == (
        "r0 was lost 2 times in a row within 60 s of its start; requests that ran: a, b; "
        "the last: it died"
    )
