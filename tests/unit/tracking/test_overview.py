import json

import pytest

from rlcore.tracking.overview import compared, listed, stall_after_s


def made(root, name, *, began, outcome, lr, scores):
    folder = root / name
    folder.mkdir(parents=True)
    attempt = {"attempt": 1, "began": began} | ({"outcome": outcome} if outcome else {})
    (folder / "run.json").write_text(json.dumps({"run_id": name, "attempts": [attempt]}))
    config = {"seed": 0, "actor": {"optim": {"lr": lr}}, "trainer": {"save_freq": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {"step": step, "critic/score/mean": score, "timing_s/step": 2.0 + step}
        for step, score in enumerate(scores, start=1)
    ]
    lines.append({"step": len(scores), "val-aux/accuracy": scores[-1]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def two(tmp_path):
    return (
        made(tmp_path, "b", began=2e9, outcome="finished", lr=1e-5, scores=[0.1, 0.2, 0.3]),
        made(tmp_path, "a", began=1e9, outcome=None, lr=1e-6, scores=[0.1, 0.4]),
    )


def test_runs_are_listed_by_their_age_with_the_value_for_the_stall_automation(two, tmp_path):
    old, new = listed(tmp_path)
    assert old.startswith("a  running")
    assert "step 2, accuracy 0.400" in old
    assert new.startswith("b  finished")
    # Steps took 3, 4 and 5 s: ten medians are 40 s.
    assert "attempt 1, step 3, accuracy 0.300, stalled after 40 s without a step" in new


def test_no_runs_are_said_to_be_none(tmp_path):
    assert list(listed(tmp_path)) == [f"no runs in {tmp_path}"]


def test_two_runs_are_compared_by_what_differs_and_their_curves(two):
    text = list(compared(*two))
    rows = [line.split("  ") for line in text]
    assert [row[0] for row in rows[1:3]] == ["actor.optim.lr", "reward, step 1"]
    by_name = {" ".join(line[:48].split()): line[48:].split() for line in text}
    assert by_name["actor.optim.lr"] == ["1e-05", "1e-06"]
    assert by_name["reward, step 2"] == ["0.2000", "0.4000"]
    assert by_name["reward, step 3"] == ["0.3000"]
    assert by_name["accuracy, step 3"] == ["0.3000"]
    assert "seed" not in by_name


def test_equal_configurations_are_said_to_be_equal(two):
    assert "the configurations are equal" in list(compared(two[0], two[0]))


def test_a_long_curve_shows_some_steps_with_both_ends(tmp_path):
    scores = [i / 100 for i in range(1, 101)]
    folder = made(tmp_path, "long", began=1, outcome="finished", lr=1, scores=scores)
    shown = [line for line in compared(folder, folder) if line.startswith("reward")]
    assert len(shown) == 8
    assert shown[0].startswith("reward, step 1 ")
    assert shown[-1].startswith("reward, step 100 ")


def test_without_steps_there_is_no_value():
    assert stall_after_s({}) is None
