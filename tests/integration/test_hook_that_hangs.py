"""A whole run whose trainer mode hangs in a hook: the process ends by itself and says where."""

import json

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


def test_a_hook_that_hangs_ends_run_and_process_after_its_deadline(project):
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
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "crashed"
    left = [p for p in psutil.process_iter(["environ"]) if str(project.root) in str(p.info)]
    assert [p.cmdline()[:3] for p in left if p.is_running()] == []
