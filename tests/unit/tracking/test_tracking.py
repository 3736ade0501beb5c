"""Trackers, batch metrics and curves."""

import asyncio
import json
import threading
import time

import pytest

from rlcore.errors import DataError
from rlcore.tracking.batch_metrics import batch_metrics
from rlcore.tracking.curves import draw_curves, lacks_step, read_metrics, validation_scores
from rlcore.tracking.tracker import TRACKERS, Tracking
from rlcore.types import SampledBatch


def batch(rewards):
    tags = [
        {
            "reward": r,
            "reward_extra": {"acc": r},
            "prompt_len": 5,
            "response_len": 2 + i,
            "seq_len": 7 + i,
        }
        for i, r in enumerate(rewards)
    ]
    return SampledBatch(
        lease_id="l", global_step=1, inner_step=0, uids=["u"],
        keys=[f"u_{i}_0" for i in range(len(tags))], tags=tags, metrics={},
    )  # fmt: skip


def test_batch_metrics_are_those_of_the_tags():
    metrics = batch_metrics(batch([1.0, 0.0, 0.5]))
    assert metrics["critic/score/mean"] == pytest.approx(0.5)
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["response_length/mean"] == pytest.approx(3.0)  # (2 + 3 + 4) / 3
    assert metrics["perf/total_num_tokens"] == 24.0  # 7 + 8 + 9


def test_parts_of_the_reward_and_turns_are_averaged():
    rows = batch([1.0, 0.0])
    for turns, tag in zip((2, 6), rows.tags, strict=True):
        tag["num_turns"] = turns
        tag["reward_extra"] |= {"brief": -float(turns), "note": "x"}
    metrics = batch_metrics(rows)
    assert metrics["reward/brief/mean"] == pytest.approx(-4.0)
    assert (metrics["num_turns/mean"], metrics["num_turns/max"]) == (4.0, 6.0)
    assert not any("note" in name for name in metrics)


def test_a_row_without_reward_is_named_and_never_counted_as_zero():
    with pytest.raises(DataError, match=r"rows without a reward: u_1_0 \(1 in all\)"):
        batch_metrics(batch([1.0, None]))


def test_metrics_lines_are_read_back_and_a_later_attempt_wins(tmp_path):
    tracking = Tracking(["console", "file", "tensorboard"], tmp_path)
    tracking.log({"a": 1.0}, 1)
    tracking.log({"a": 2.0}, 2)
    tracking.log({"a": 3.0}, 2)
    asyncio.run(tracking.finish(60))
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"a": 1.0}, 2: {"a": 3.0}}
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_line_that_was_being_written_when_its_process_died_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert read_metrics(path) == {1: {"a": 1.0}}
    tracking = Tracking(["file"], tmp_path)
    tracking.log({"a": 2.0}, 2)
    asyncio.run(tracking.finish(60))
    assert read_metrics(path) == {1: {"a": 1.0}, 2: {"a": 2.0}}


def test_validation_scores_are_read_back_up_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert validation_scores(path, up_to_step=9) == {}
    lines = [
        {"step": 0, "val-aux/accuracy": 0.1},
        {"step": 1},
        {"step": 4, "val-aux/accuracy": 0.4},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert validation_scores(path, up_to_step=3) == {"0": 0.1}
    assert validation_scores(path, up_to_step=4) == {"0": 0.1, "4": 0.4}
    assert lacks_step(path, 3)
    assert not lacks_step(path, 1)
    assert not lacks_step(tmp_path / "no-such-tracker", 3)


def test_a_tracker_that_breaks_is_switched_off_and_the_others_go_on(tmp_path, caplog):
    calls = []

    class Breaks:
        def __init__(self, folder):
            pass

        def log(self, metrics, step):
            calls.append(step)
            raise RuntimeError("no account")

        def finish(self):
            raise AssertionError("was switched off")

    TRACKERS.register("breaks-in-test")(Breaks)
    tracking = Tracking(["breaks-in-test", "file"], tmp_path)
    tracking.log({"a": 1.0}, 1)
    tracking.log({"a": 2.0}, 2)
    asyncio.run(tracking.finish(60))
    assert calls == [1]
    assert tracking.failures == [
        "tracker breaks-in-test is switched off: RuntimeError('no account')"
    ]
    assert "tracker breaks-in-test failed and is switched off" in caplog.text
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]


@pytest.fixture
def hangs():
    """Return a function that registers a tracker which hangs in one of its methods."""
    over = threading.Event()
    calls = []

    def register(where):
        class Hangs:
            def __init__(self, folder):
                self._hang("open")

            def log(self, metrics, step):
                self._hang("log")

            def finish(self):
                self._hang("finish")

            def _hang(self, method):
                calls.append(method)
                if method == where:
                    over.wait(60)

        TRACKERS.register(f"hangs-in-{where}")(Hangs)
        return [f"hangs-in-{where}", "file"]

    register.calls = calls
    yield register
    over.set()


def steps_written(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize("where", ["log", "finish"])
def test_a_tracker_that_hangs_is_switched_off_while_the_loop_goes_on(tmp_path, hangs, where):
    tracking = Tracking(hangs(where), tmp_path)
    ticks = []

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def run():
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.1)  # both are open
        for step in (1, 2, 3):
            tracking.log({"a": 1.0}, step)
            await tracking.settle(0.3)
        await tracking.finish(0.3)
        ticking.cancel()

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 0.1 + 0.3 + 1  # one deadline, not one per step
    assert len(ticks) >= 20
    assert tracking.failures == [
        f"tracker hangs-in-{where} is switched off: it did not answer within 0.3 s"
    ]
    assert hangs.calls.count("log") == (1 if where == "log" else 3)
    assert steps_written(tmp_path) == [1, 2, 3]


def test_a_tracker_may_open_slowly_and_is_switched_off_when_it_never_does(tmp_path, hangs):
    async def run():
        tracking = Tracking(hangs("open"), tmp_path, open_s=0.5)
        await asyncio.sleep(0.1)
        tracking.log({"a": 1.0}, 1)
        await tracking.settle(0.1)  # not waited for: it opens
        assert tracking.failures == []
        await asyncio.sleep(0.5)
        tracking.log({"a": 1.0}, 2)
        await tracking.settle(0.1)
        assert tracking.failures == [
            "tracker hangs-in-open is switched off: it did not open within 0.5 s"
        ]
        await tracking.finish(0.3)

    asyncio.run(run())
    assert steps_written(tmp_path) == [1, 2]


def test_a_tracker_that_opens_late_gets_what_was_logged_meanwhile(tmp_path):
    ready, seen = threading.Event(), []

    class Late:
        def __init__(self, folder):
            ready.wait(10)

        def log(self, metrics, step):
            seen.append(step)

        def finish(self):
            seen.append("finish")

    async def run():
        tracking = Tracking(["late-in-test"], tmp_path)
        for step in (1, 2):
            tracking.log({"a": 1.0}, step)
            await tracking.settle(5)
        assert seen == []
        ready.set()
        await tracking.finish(10)
        assert tracking.failures == []

    TRACKERS.register("late-in-test")(Late)
    asyncio.run(run())
    assert seen == [1, 2, "finish"]


def test_curves_are_drawn_from_the_metrics(tmp_path):
    lines = [
        {"step": 0, "val-aux/accuracy": 0.1, "val-aux/accuracy_stderr": 0.02},
        {"step": 1, "critic/score/mean": 0.2},
        {
            "step": 2,
            "critic/score/mean": 0.4,
            "val-aux/accuracy": 0.3,
            "val-aux/accuracy_stderr": 0.03,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves")
    assert [path.name for path in written] == ["reward.png", "accuracy.png"]
    assert all(
        path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written
    )


def test_wandb_works_without_an_account_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run-7"
    folder.mkdir()
    config = {"trainer": {"project_name": "sums", "experiment_name": "nightly"}}
    (folder / "config.json").write_text(json.dumps(config))
    for step in (1, 2):
        tracking = Tracking(["wandb"], folder)
        tracking.log({"critic/score/mean": 0.5}, step)
        asyncio.run(tracking.finish(60))
        assert tracking.failures == []
    written = list((folder / "wandb").glob("offline-run-*/run-run-7.wandb"))
    assert len(written) == 2  # both of wandb run `run-7`, which `wandb sync` puts together
    assert all(file.stat().st_size > 0 for file in written)
