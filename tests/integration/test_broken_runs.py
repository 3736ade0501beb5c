"""Whole runs in which a part breaks: the process ends by itself, soon, and names that part."""

import json
import re
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
    add, step, too_long = engine.add, engine.step, []

    def watching_add(request):
        if request.request_id.startswith("train/0/2-0-"):
            too_long.append(request)
        add(request)

    def breaking_step():
        if too_long:
            raise MemoryError("no room for keys and values")
        return step()

    engine.add, engine.step = watching_add, breaking_step
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


def test_a_request_that_breaks_every_engine_ends_the_run(project, served, no_process_is_left):
    (project.root / "breaks.py").write_text(ENGINE)
    folder = project.root / "broken"
    began = time.monotonic()
    code, text = project.run(
        "train", "grpo-tiny", "trainer.user_modules=[breaks.py]",
        "actor_rollout_ref.rollout.name=breaks", "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder}", "trainer.runs_root=breaking", **served,
    )  # fmt: skip
    assert code == 1, text[-4000:]
    assert "replica-0 is dead: MemoryError('no room for keys and values')" in text, text[-6000:]
    # The third one is not replaced, and what it was asked for is named.
    assert re.search("replica-0, replica-0, replica-0 were lost while request train/0/", text)
    # Not after deadlines.start, for which a request waits for a replica.
    assert time.monotonic() - began < 150
    assert outcome(folder) == "crashed"
    assert no_process_is_left()


def test_a_hook_that_hangs_ends_run_and_process_after_its_deadline(
    project, served, no_process_is_left
):
    (project.root / "hangs.py").write_text(MODE)
    folder = project.root / "hung"
    code, text = project.run(
        "train", "grpo-tiny", "trainer.user_modules=[hangs.py]",
        "trainer.v1.trainer_mode=hangs", "deadlines.update_weights=4",
        "trainer.val_before_train=False", f"trainer.default_local_dir={folder}",
        "trainer.runs_root=hanging", **served,
    )  # fmt: skip
    assert code == 1, text[-4000:]
    assert "hook on_train_begin of Hangs did not return within 20 s (step 0)" in text
    assert outcome(folder) == "crashed"
    assert no_process_is_left()
