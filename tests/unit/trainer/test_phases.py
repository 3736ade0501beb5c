"""A phase runs on a copy: `state` comes back, any other change is an error with its name."""

import pytest

from rlcore.errors import StateChangeError
from rlcore.trainer.phases import BATCH_PHASES, Phase, active_batch_phases, run_phase
from rlcore.types import BatchRef, CallKey

KEY = CallKey(run_id="r", attempt=1, global_step=3)
BATCH = BatchRef(
    run_id="r", global_step=3, inner_step=0, lease_id="l", num_prompts=1, num_trajectories=2
)


class Trainer:
    def __init__(self):
        self.state = {"n": 1}
        self.call_key = None
        self.deadline_s = 0.0
        self.seen = [1]

    def idle_phases(self):
        return frozenset()

    def good(self):
        self.state["n"] += 1
        return {"m": 2.0, "step": float(self.call_key.global_step), "deadline": self.deadline_s}

    def sample(self):
        return BATCH, {"waited": 1.0}

    def sets_attribute(self, batch):
        self.extra = batch

    def rebinds(self, batch):
        self.seen = [1]

    def mutates_in_place(self, batch):
        self.seen.append(2)

    def _update_actor(self, batch):
        return {}

    def _balance_batch(self, batch):
        return {}


def run(method, batch=None):
    return run_phase(Trainer(), Phase("p", method), KEY, batch, deadline_s=100)


def test_state_and_metrics_come_back_and_the_key_is_there():
    result = run("good")
    assert result.state == {"n": 2}
    assert result.metrics == {"m": 2.0, "step": 3.0, "deadline": 90.0}
    assert result.batch is None


def test_sampling_gives_the_batch_that_later_phases_get():
    result = run("sample")
    assert (result.batch, result.metrics) == (BATCH, {"waited": 1.0})


@pytest.mark.parametrize(
    ("method", "name"),
    [("sets_attribute", "extra"), ("rebinds", "seen"), ("mutates_in_place", "seen")],
)
def test_a_change_outside_state_is_refused_and_named(method, name):
    with pytest.raises(StateChangeError, match=rf"Trainer.{method} changed {name};"):
        run(method, BATCH)


def test_only_the_phases_that_a_class_defines_run_in_the_order_of_a_step():
    names = [phase.name for phase in active_batch_phases(Trainer())]
    assert names == ["balance_batch", "update_actor"]
    assert [p.name for p in BATCH_PHASES].index("compute_values") < [
        p.name for p in BATCH_PHASES
    ].index("compute_advantage")
