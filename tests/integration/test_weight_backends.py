"""Whole runs by every backend of weight updates, and one whose only replica is killed, twice.

All are the same run under `full_determinism`: what the weights travel by changes nothing, nor does
a replica that dies.
"""

import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest
import torch
from real_parts.project import REFERENCE, REFERENCE_STEPS
from safetensors.torch import load_file

from rlcore.tracking.curves import read_metrics

# A test may set up two whole runs.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

DIES_ONCE = """
import os
import signal
from dataclasses import replace
from pathlib import Path

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, WEIGHT_RECEIVERS, load_each
from rlcore.checkpoint_engine.shm import ShmCheckpointEngine, ShmReceiver

DIED = Path(__file__).with_name("died")


@CHECKPOINT_ENGINES.register("dies_once")
class Engine(ShmCheckpointEngine):
    def push(self, key, meta, replicas):
        meta = replace(meta, transport=self._settings.transport("dies_once"))
        return load_each(key, dict.fromkeys(replicas, meta), replicas)


@WEIGHT_RECEIVERS.register("dies_once")
class Receiver(ShmReceiver):
    def receive(self, meta, buffer):
        for bucket in super().receive(meta, buffer):
            if meta.version == 2 and not DIED.exists():
                DIED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket
"""
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine."


def overrides(project, name: str, backend: str) -> tuple[str, ...]:
    return (
        *REFERENCE,
        f"{ENGINE}backend={backend}",
        f"trainer.runs_root={project.root / 'weights'}",
        f"trainer.default_local_dir={project.root / name}",
    )


def assert_same_run(a: Path, b: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    versions = [
        [m.get("checkpoint_engine/version") for m in read_metrics(run / "metrics.jsonl").values()]
        for run in (a, b)
    ]
    assert versions[0] == versions[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("shm", ("actor_rollout_ref.rollout.num_replicas=2",)),
        ("gloo", (f"+{ENGINE}engine_kwargs.gloo.host=127.0.0.1",)),
        ("mooncake", (f"{ENGINE}update_weights_bucket_megabytes=1",)),
    ],
)
def test_a_run_ends_with_the_same_weights_whatever_they_travel_by(
    joined, reference_run, backend, more
):
    code, text = joined.run("train", "grpo-tiny", *overrides(joined, backend, backend), *more)
    assert code == 0, text[-6000:]
    assert_same_run(joined.root / backend, reference_run)
    # What the log says of each update: so many replicas by this backend.
    replicas = 2 if backend == "shm" else 1
    assert text.count(f"on {replicas} replicas by {backend}:") == REFERENCE_STEPS + 1, text[-6000:]


def test_killed_replicas_come_back_and_the_run_ends_as_if_nothing_had_happened(
    project, reference_run
):
    """One that generates, and one in the middle of a push: each time it is the only one."""
    module = project.root / "dies_once.py"
    module.write_text(DIES_ONCE)
    arguments = overrides(project, "replaced", "dies_once")
    process = project.start(
        "train", "grpo-tiny", *arguments, f"{ENGINE}custom_backend_module={module}"
    )
    family = project.until(process, f"step    1/{REFERENCE_STEPS}")
    (replica,) = [p for p in family if any("LLMServerActor" in part for part in p.cmdline())]
    os.kill(replica.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0, output[-6000:]
    folder = project.root / "replaced"
    assert_same_run(folder, reference_run)
    assert (project.root / "died").exists()
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "finished"
    with sqlite3.connect(project.root / "weights" / ".prefect" / "prefect.db") as database:
        tries = database.execute(
            "select t.run_count from task_run t join flow_run page on t.flow_run_id = page.id "
            "join task_run call on page.parent_task_run_id = call.id "
            "join flow_run run on call.flow_run_id = run.id "
            "where t.name = 'step-0002/update_weights' and run.parameters like '%dies_once%'"
        ).fetchall()
    # The retry is a second try of the same task run, on its page.
    assert len(tries) == 1
    assert tries[0][0] >= 2
