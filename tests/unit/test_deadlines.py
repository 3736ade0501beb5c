"""Deadlines of phases: configured, first call, then ten medians but never under the minimum."""

import pytest

from rlcore.config import load_config
from rlcore.config.trainer import PHASES
from rlcore.trainer.phases import PHASE_NAMES
from tasks.deadlines import PhaseDeadlines


def deadlines(**overrides):
    return PhaseDeadlines(load_config("grpo-tiny", overrides))


def test_every_phase_of_a_step_has_a_deadline_key():
    assert set(PHASE_NAMES) == set(PHASES)


def test_first_call_then_ten_medians_of_the_last_twenty():
    found = deadlines(**{"deadlines.minimum": 5, "deadlines.first_call": 77})
    assert found.for_phase("update_actor") == 77
    for seconds in [1000.0] + [2.0] * 19 + [8.0]:
        found.record("update_actor", seconds)
    assert found.for_phase("update_actor") == pytest.approx(20.0)  # the 1000 s have left the window
    found.record("sample_batch", 0.1)
    assert found.for_phase("sample_batch") == 5


def test_a_configured_deadline_wins():
    found = deadlines(**{"deadlines.validate": 12})
    found.record("validate", 100.0)
    assert found.for_phase("validate") == 12
