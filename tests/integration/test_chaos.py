"""One run in which a process of every kind is killed, each in another phase.

It ends with bit for bit the weights of a run that nobody disturbed. `make chaos` kills every kind
in every phase.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from real_parts.project import REFERENCE
from safetensors.torch import load_file

from rlcore.tracking.curves import read_metrics
from rlcore.trainer.snapshots import snapshot_root

pytestmark = [pytest.mark.integration, pytest.mark.async_modes, pytest.mark.timeout(600)]

MODE = Path(__file__).with_name("user_code") / "chaos_mode.py"
PLAN = [
    (1, "add_batch_to_generate", "agent loop worker"),
    (1, "compute_reward", "ledger"),
    (1, "compute_advantage", "executor"),
    (2, "sample_batch", "replica"),
    (2, "update_actor", "training rank"),
    (2, "commit_step", "driver"),
    (3, "compute_old_log_probs", "queue host"),
]
MAX_ATTEMPTS = 5


@dataclass
class Struck:
    """A run in which everything died once, and what each attempt printed."""

    folder: Path
    texts: list[str]
    codes: list[int]


@pytest.fixture(scope="module")
def struck(joined):
    shutil.copy(MODE, joined.root)
    folder = joined.root / "chaos"
    folder.mkdir()
    (folder / "chaos.json").write_text(json.dumps(PLAN))
    arguments = (
        "train", "grpo-tiny", *REFERENCE, "trainer.v1.trainer_mode=chaos",
        "trainer.user_modules=[chaos_mode.py]", f"trainer.max_attempts={MAX_ATTEMPTS}",
        f"trainer.runs_root={joined.root / 'async'}", f"trainer.default_local_dir={folder}",
    )  # fmt: skip
    found = Struck(folder, [], [])
    while len(found.codes) < MAX_ATTEMPTS and found.codes[-1:] != [0]:
        code, text = joined.run(*arguments)
        found.codes.append(code)
        found.texts.append(text)
    assert found.codes[-1] == 0, found.texts[-1][-6000:]
    return found


def test_everything_was_killed_once(struck):
    done = {path.name: path.read_text() for path in struck.folder.glob("struck-*")}
    assert done == {f"struck-{step}-{phase}": kind for step, phase, kind in PLAN}


def test_only_driver_and_queue_host_end_an_attempt(struck):
    attempts = json.loads((struck.folder / "run.json").read_text())["attempts"]
    outcomes = [attempt.get("outcome") for attempt in attempts]
    assert outcomes == [None, "crashed", "finished"], struck.texts[-1][-3000:]


def test_no_step_is_lost_and_each_is_reported_once(struck):
    # The driver died after snapshot 2: nothing of step 2 is done again.
    assert "step-0002/update_actor" not in struck.texts[1]
    assert "step-0003/update_actor" in struck.texts[2]
    metrics = read_metrics(struck.folder / "metrics.jsonl")
    lines = (struck.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == sorted(metrics) == [0, 1, 2, 3]
    assert [metrics[step]["training/prompts_fed"] for step in (1, 2, 3)] == [4, 4, 4]


def test_a_lost_training_rank_is_told_and_its_phases_are_repeated(struck):
    (told,) = (line for line in struck.texts[0].splitlines() if "the group is started anew" in line)
    assert "trainer rank 0: update_actor" in told
    assert "1 phases of the step are repeated" in told  # compute_old_log_probs
    metrics = read_metrics(struck.folder / "metrics.jsonl")
    restarts = {step: m["training/group_restarts"] for step, m in metrics.items()}
    assert restarts == {0: 0, 1: 0, 2: 1, 3: 0}


def test_the_weights_are_bit_for_bit_those_of_an_undisturbed_run(struck, reference_run):
    ours, theirs = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (struck.folder, reference_run)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_run_that_is_over_leaves_no_snapshot(struck, reference_run):
    assert not snapshot_root(struck.folder).exists()
    assert not snapshot_root(reference_run).exists()
