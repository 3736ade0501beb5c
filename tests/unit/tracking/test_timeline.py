"""The timeline of a run, read from the files that a run leaves."""

import json

import pytest

from rlcore.errors import CheckpointError
from rlcore.tracking.timeline import Span, draw_timeline, read_timeline


def lines(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def spec(uid, step, *, validate=False):
    return {"uid": uid, "global_step": step, "validate": validate}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "attempts": [{}, {}]}))
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"v1": {"trainer_mode": "sync"}}}))
    timing = {"timing_s/on_step_begin": 0.0, "timing_s/sample_batch": 2.0, "critic/score/mean": 1.0}
    step = {**timing, "timing_s/update_actor": 4.0, "timing_s/step": 9.0}
    lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "at": 91.0, **step},
            {"step": 2, "at": 50.0, **step},  # of the attempt before
            {"step": 2, "at": 100.0, **step},
            {"step": 3, "at": 109.0, **step},
        ],
    )
    lines(
        tmp_path / "journal" / "attempt-2.jsonl",
        [
            {"op": "open", "at": 80.0},
            {"op": "feed", "at": 89.0, "specs": [spec("a", 1), spec("b", 2)]},
            {"op": "feed", "at": 89.5, "specs": [spec("v", 2, validate=True)]},
            {"op": "claim", "at": 90.0, "worker": "w", "uids": ["a", "b", "v"]},
            {"op": "settle", "at": 90.5, "uid": "a"},
            {"op": "claim", "at": 92.0, "worker": "x", "uids": ["b"]},  # its first worker died
            {"op": "settle", "at": 93.0, "uid": "v"},
            {"op": "settle", "at": 94.0, "uid": "b"},
        ],
    )  # fmt: skip
    return tmp_path


def test_phases_end_with_their_step_and_prompts_last_from_claim_to_settling(folder):
    timeline = read_timeline(folder, first=2, last=2)
    assert timeline.title == "sync (r)"
    # 9 s of step, 6 of phases: 1 s before, between and after them.
    assert timeline.phases == (
        Span(name="sample_batch", step=2, begin=92.0, end=94.0),
        Span(name="update_actor", step=2, begin=95.0, end=99.0),
    )
    # `a` was over when step 2 began; validation is left out.
    assert timeline.prompts == (Span(name="b", step=2, begin=92.0, end=94.0),)
    both = read_timeline(folder, first=2, last=3)
    assert [(span.step, span.end) for span in both.phases if span.name == "update_actor"] == [
        (2, 99.0),
        (3, 108.0),
    ]


def test_a_picture_of_two_runs_is_written(folder, tmp_path):
    timeline = read_timeline(folder, first=2, last=3)
    draw_timeline([timeline, timeline], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_steps_that_are_not_there_are_named(folder):
    with pytest.raises(CheckpointError, match="no steps 7 to 9 with times"):
        read_timeline(folder, first=7, last=9)
