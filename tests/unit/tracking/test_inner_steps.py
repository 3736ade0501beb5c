"""The report of a step of several inner steps."""

import pytest

from rlcore.tracking.inner_steps import add_inner_step


def test_counts_are_added_extremes_kept_and_the_rest_averaged():
    parts = [
        {
            "a/mean": 1.0,
            "a/max": 5.0,
            "a/min": 2.0,
            "timing_s/x": 1.0,
            "actor/optimizer_steps": 1.0,
        },
        {
            "a/mean": 2.0,
            "a/max": 7.0,
            "a/min": 3.0,
            "timing_s/x": 2.0,
            "actor/optimizer_steps": 1.0,
        },
        {
            "a/mean": 6.0,
            "a/max": 6.0,
            "a/min": 1.0,
            "timing_s/x": 4.0,
            "actor/optimizer_steps": 2.0,
        },
    ]
    found = {"training/prompts_fed": 8.0}
    for inner_step, part in enumerate(parts):
        found = add_inner_step(found, part, inner_step)
    assert found == {
        "training/prompts_fed": 8.0,
        "a/mean": pytest.approx((1 + 2 + 6) / 3),
        "a/max": 7.0,
        "a/min": 1.0,
        "timing_s/x": 7.0,
        "actor/optimizer_steps": 4.0,
    }


def test_a_step_of_one_inner_step_replaces_what_an_earlier_try_said():
    assert add_inner_step({"a/mean": 1.0}, {"a/mean": 3.0}, 0) == {"a/mean": 3.0}
