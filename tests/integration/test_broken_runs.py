"""Whole runs in which a part breaks: the process ends by itself, soon, and names that part."""

import json
import time

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MODE = """
import time

from rlcore.trainer.base import register_trainer
from rlcore.trainer.sync import PPOTrainerSync


@register_trainer("hangs")
class Hangs(PPOTrainerSync):
    def on_train_begin(self):
        time.sleep(3600)
"""


ENGINE = """
from rlcore.rollout.engine import ENGINES


@ENGINES.register("breaks")
def breaks(spec):
    engine = ENGINES.get("transformers")(spec)
    step, steps = engine.step, iter(range(40))

    def breaking_step():
        if next(steps, None) is None:
            raise MemoryError("no room for keys and values")
        return step()

    engine.step = breaking_step
    return engine
"""


def outcome(folder):
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    return attempt["outcome"]


def processes_of(project):
    """Processes with the project's folder in their environment: other tests have some, too."""
    wanted = str(project.root / "tmp")
    return {p for p in psutil.process_iter(["environ"]) if wanted in str(p.info)}


@pytest.fixture
def no_process_is_left(project):
    before = processes_of(project)

    def check():
        _, alive = psutil.wait_procs(processes_of(project) - before, timeout=30)
        return not alive

    return check


def test_an_engine_that_breaks_ends_the_run_at_once_with_its_error(project, no_process_is_left):
    (project.root / "breaks.py").write_text(ENGINE)
    folder = project.root / "broken"
    began = time.monotonic()
    code, text = project.run(
        "train", "grpo-tiny", "trainer.user_modules=[breaks.py]",
        "actor_rollout_ref.rollout.name=breaks", "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder}", "trainer.runs_root=breaking",
    )  # fmt: skip
    assert code == 1, text[-4000:]
    assert "replica-0 is dead: MemoryError('no room for keys and values')" in text, text[-6000:]
    # Not after deadlines.start, for which a request waits for a replica.
    assert time.monotonic() - began < 150
    assert outcome(folder) == "crashed"
    assert no_process_is_left()


def test_a_hook_that_hangs_ends_run_and_process_after_its_deadline(project, no_process_is_left):
    (project.root / "hangs.py").write_text(MODE)
    folder = project.root / "hung"
    code, text = project.run(
        "train", "grpo-tiny", "trainer.user_modules=[hangs.py]",
        "trainer.v1.trainer_mode=hangs", "deadlines.update_weights=4",
        "trainer.val_before_train=False", f"trainer.default_local_dir={folder}",
        "trainer.runs_root=hanging",
    )  # fmt: skip
    assert code == 1, text[-4000:]
    assert "hook on_train_begin of Hangs did not return within 20 s (step 0)" in text
    assert outcome(folder) == "crashed"
    assert no_process_is_left()
