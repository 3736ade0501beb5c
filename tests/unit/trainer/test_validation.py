"""Held-out metrics worked out by hand; a failed session is wrong but has no reward."""

import pytest

from rlcore.testing.ledger import failed_session, good_session, prompt_spec
from rlcore.trainer.validation import validation_metrics


def spec(uid, source):
    return prompt_spec(uid, fields={"data_source": source}, num_sessions=1)


def right(uid, reward=1.0):
    return [good_session(uid, 0, reward=reward, reward_extra={"acc": 1.0})]


def wrong(uid, reward=0.0):
    return [good_session(uid, 0, reward=reward, reward_extra={"acc": 0.0})]


def test_accuracy_per_source_and_over_all_with_its_standard_error():
    specs = [spec("a", "sums"), spec("b", "sums"), spec("c", "sums"), spec("d", "words")]
    settled = {"a": right("a"), "b": wrong("b", 0.5), "c": wrong("c"), "d": right("d")}
    metrics = validation_metrics(specs, settled)
    assert metrics["val-core/sums/acc/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-core/words/acc/mean@1"] == 1.0
    assert metrics["val-aux/sums/reward/mean@1"] == pytest.approx(0.5)  # (1 + 0.5 + 0) / 3
    assert metrics["val-aux/accuracy"] == pytest.approx(0.5)  # 2 of 4
    # sqrt(p (1 - p) / n) = sqrt(0.25 / 4)
    assert metrics["val-aux/accuracy_stderr"] == pytest.approx(0.25)
    assert metrics["val-aux/num_prompts"] == 4


def test_a_failed_session_counts_as_wrong_and_is_in_no_mean_of_rewards():
    specs = [spec("a", "sums"), spec("b", "sums")]
    metrics = validation_metrics(specs, {"a": right("a"), "b": [failed_session(0)]})
    assert metrics["val-aux/accuracy"] == pytest.approx(0.5)
    assert metrics["val-aux/sums/reward/mean@1"] == 1.0
    assert metrics["val-aux/failed_sessions"] == 1
