import pytest

from rlcore.errors import FencedError
from rlcore.fencing import KEPT_STEPS, Fence
from rlcore.types import CallKey


def key(step, *, attempt=1, try_number=1, phase="update_actor", run_id="run-1"):
    return CallKey(
        run_id=run_id, attempt=attempt, global_step=step, phase=phase, try_number=try_number
    )


def test_older_tries_of_the_same_phase_are_refused():
    fence = Fence("run-1", 1)
    fence.admit(key(3))
    fence.admit(key(3, try_number=2))
    fence.admit(key(3, try_number=2))
    fence.admit(key(3, phase="validate"))
    fence.admit(key(4))
    with pytest.raises(FencedError, match="try 2 of this phase has been seen"):
        fence.admit(key(3))


def test_older_attempts_and_other_runs_are_refused():
    fence = Fence("run-1", 2)
    with pytest.raises(FencedError, match="attempt 2 has begun"):
        fence.admit(key(1, attempt=1))
    with pytest.raises(FencedError, match="belongs to run run-1"):
        fence.admit(key(1, attempt=2, run_id="run-2"))
    assert not fence.advance(2)
    fence.admit(key(9, attempt=2, try_number=5))
    # A new attempt may go back to a step of the last checkpoint and counts tries anew.
    fence.admit(key(4, attempt=3))
    assert fence.attempt == 3


def test_a_step_long_past_is_refused():
    fence = Fence("run-1", 1)
    fence.admit(key(20))
    fence.admit(key(20 - KEPT_STEPS + 1))
    with pytest.raises(FencedError, match="step 20 has been seen"):
        fence.admit(key(20 - KEPT_STEPS))


def test_a_given_up_try_is_refused_before_the_next_one_is_seen():
    fence = Fence("run-1", 1)
    fence.admit(key(3, try_number=2))
    fence.give_up(key(3, try_number=2))
    with pytest.raises(FencedError, match="or this one given up"):
        fence.admit(key(3, try_number=2))
    fence.admit(key(3, phase="validate"))
    fence.admit(key(3, try_number=3))
    # Of another attempt or an older try: nothing changes.
    fence.give_up(key(3, attempt=2, try_number=9))
    fence.give_up(key(3, try_number=1))
    fence.admit(key(3, try_number=3))
