"""The alarm about engine and trainer: which limits hold, and what is above them."""

import logging
import math

import pytest

from rlcore.config import load_config
from rlcore.tracking.engine_gap import ALARM, GAPS, limits_of, watch_engine

A = "actor_rollout_ref."
LIMIT = f"{A}rollout.log_probs_alarm."


def gap(mean, largest):
    return {GAPS["mean"]: mean, GAPS["max"]: largest, "actor/entropy": 1.0}


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], {"mean": 1e-5, "max": 1e-3}),
        ([f"{A}actor.dtype=bfloat16"], {}),
        ([f"{A}rollout.dtype=bfloat16"], {}),
        (["trainer.v1.trainer_mode=colocate_async"], {}),
        ([f"{LIMIT}max=0.5"], {"mean": 1e-5, "max": 0.5}),
        ([f"{A}rollout.dtype=bfloat16", f"{LIMIT}mean=0.1"], {"mean": 0.1}),
    ],
)
def test_limits_follow_from_types_and_mode_unless_they_are_set(overrides, limits):
    assert limits_of(load_config("grpo-tiny", overrides)) == limits


def test_vllm_has_a_limit_of_its_own():
    # Copies are not checked: vLLM need not be installed.
    config = load_config("grpo-tiny")
    generation = config.actor_rollout_ref
    rollout = generation.rollout.model_copy(update={"name": "vllm"})
    generation = generation.model_copy(update={"rollout": rollout})
    config = config.model_copy(update={"actor_rollout_ref": generation})
    assert limits_of(config) == {"mean": 2e-5, "max": 1e-3}


@pytest.mark.parametrize(
    ("mean", "largest", "named"),
    [
        (1e-5, 1e-3, []),
        (1.1e-5, 1e-3, ["mean 1.1e-05 (limit 1e-05)"]),
        (0.0, 0.002, ["max 0.002 (limit 0.001)"]),
        (math.nan, math.nan, ["mean nan", "max nan"]),
    ],
)
def test_a_gap_above_a_limit_is_counted_and_logged(caplog, mean, largest, named):
    with caplog.at_level(logging.WARNING):
        metrics = watch_engine(load_config("grpo-tiny"), gap(mean, largest))
    assert metrics[ALARM] == (1.0 if named else 0.0)
    assert metrics["actor/entropy"] == 1.0
    assert len(caplog.records) == bool(named)
    assert all(text in caplog.text for text in named)


def test_without_a_limit_or_without_the_engines_log_probs_nothing_is_said(caplog):
    in_bfloat16 = load_config("grpo-tiny", [f"{A}rollout.dtype=bfloat16"])
    assert ALARM not in watch_engine(in_bfloat16, gap(1.0, 1.0))
    assert watch_engine(load_config("grpo-tiny"), {"actor/entropy": 1.0}) == {"actor/entropy": 1.0}
    assert not caplog.records
