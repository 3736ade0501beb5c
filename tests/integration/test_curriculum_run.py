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


def only_run(joined, root):
    (run,) = (path for path in (joined.root / root).iterdir() if path.name != ".prefect")
    return run


def test_a_resumed_curriculum_goes_the_way_of_one_without_a_stop(joined):
    same = ["actor_rollout_ref.rollout.full_determinism=true", f"data.cache_dir={joined.root}/c"]
    code, text = joined.run("train", "grpo-tiny-curriculum", *same, "trainer.runs_root=whole")
    assert code == 0, text[-3000:]
    whole = only_run(joined, "whole")
    first = [*same, "trainer.runs_root=parts", "trainer.default_local_dir=parts/run"]
    code, text = joined.run(
        "train", "grpo-tiny-curriculum", *first, "trainer.total_training_steps=3"
    )
    assert code == 0, text[-3000:]
    code, text = joined.run("train", "grpo-tiny-curriculum", *first)
    assert code == 0, text[-3000:]
    parts = joined.root / "parts" / "run"
    assert fed_rows(parts) == fed_rows(whole)
    assert len(fed_rows(whole)) == len(set(fed_rows(whole))) == 24
    # Only the first epoch has every row once.
    assert sorted(row.split("-")[2] for row in fed_rows(whole)[:8]) == [str(i) for i in range(8)]
    state = json.loads((whole / "global_step_6" / "trainer.json").read_text())["state"]
    assert set(state["sampler"]) == {"live", "epochs"}
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
    last = {name: value for record in steps for name, value in record.items()}
    assert "val-core/rollflow/letters/acc/pass@4" in last
    assert "val-aux/gain_over_base" in last
