"""A run whose order follows from its results: stopped and resumed, it sees the same rows."""

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


def fed_rows(run):
    """Return epoch and row of the training prompts of all attempts, in the order they were fed."""
    events = [
        json.loads(line)
        for path in sorted((run / "journal").glob("attempt-*.jsonl"))
        for line in path.open()
    ]
    fed = [spec for event in events if event["op"] == "feed" for spec in event["specs"]]
    # train-<epoch>-<row>-<digest of the run>: the digest differs between runs.
    return [spec["uid"].rsplit("-", 1)[0] for spec in fed if not spec["validate"]]


def train(joined, run, *overrides):
    code, text = joined.run(
        "train", "grpo-tiny-curriculum", "actor_rollout_ref.rollout.full_determinism=true",
        f"data.cache_dir={joined.root}/c", f"trainer.default_local_dir={run}",
        f"trainer.runs_root={run.parent}", *overrides,
    )  # fmt: skip
    assert code == 0, text[-3000:]


def test_a_resumed_curriculum_goes_the_way_of_one_without_a_stop(joined):
    whole = joined.root / "curriculum" / "run"
    train(joined, whole)
    fed = fed_rows(whole)
    assert len(fed) == len(set(fed)) == 24
    halfway = whole / "global_step_3"
    train(joined, whole, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={halfway}")
    assert fed_rows(whole) == [*fed, *fed[12:]]
    # Only the first epoch has every row once.
    assert sorted(row.split("-")[2] for row in fed[:8]) == [str(i) for i in range(8)]
    state = json.loads((whole / "global_step_6" / "trainer.json").read_text())["state"]
    assert set(state["sampler"]) == {"live", "epochs"}
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
    last = {name: value for record in steps for name, value in record.items()}
    assert "val-core/rollflow/letters/acc/pass@4" in last
    assert "val-aux/gain_over_base" in last
