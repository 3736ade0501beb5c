"""The whole path on the tiny model: its worker is killed in step 2, all of it in step 3; resumed.

Real CLI, embedded Prefect server, own Ray, TransferQueue, engine, trainer; looked at through what
it leaves: the run folder and Prefect's database.
"""

import json
import os
import shutil
import signal
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.tracking.curves import read_metrics
from rlcore.tracking.timeline import read_timeline
from rlcore.trainer.snapshots import snapshot_root

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]  # two runs, one after the other

STEPS = 4
PHASES = [
    "add_batch_to_generate",
    "sample_batch",
    "sleep_replicas",
    "compute_reward",
    "balance_batch",
    "compute_old_log_probs",
    "compute_advantage",
    "update_actor",
    "save_snapshot",
    "commit_step",
]


@dataclass
class Story:
    """A run in two attempts: killed, as if with its host after checkpoint 2; finished."""

    folder: Path
    alive_after_kill: list
    text: str


def is_agent_loop_worker(process):
    try:
        return any("AgentLoopWorkerActor" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def story(project):
    process = project.start("train", "grpo-tiny", f"trainer.total_training_steps={STEPS}", "seed=3")
    family = project.until(process, f"step    1/{STEPS}")
    (worker,) = (process for process in family if is_agent_loop_worker(process))
    worker.kill()
    family = project.until(process, f"step    3/{STEPS}", freeze=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    _, alive_after_kill = psutil.wait_procs(family, timeout=30)
    (folder,) = (path for path in (project.root / "runs").iterdir() if path.name != ".prefect")
    forget_what_followed_checkpoint_2(folder)

    code, text = project.run("resume", folder.name)
    assert code == 0, text[-4000:]
    return Story(
        folder=folder,
        alive_after_kill=alive_after_kill,
        text=text,
    )


def forget_what_followed_checkpoint_2(folder):
    """Leave what a run has whose host is lost after checkpoint 2, before validation 2 is reported.

    Snapshots are gone with the host; that of step 3 was there.
    """
    snapshots = snapshot_root(folder)
    assert [path.name for path in snapshots.glob("global_step_*")] == ["global_step_3"]
    shutil.rmtree(snapshots)
    file = folder / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] < 2]
    file.write_text("".join(f"{line}\n" for line in lines))
    (folder / "generations" / "step-0002.jsonl").unlink()


@pytest.fixture
def run(story):
    return story.folder


@pytest.fixture
def database(project):
    return sqlite3.connect(project.root / "runs" / ".prefect" / "prefect.db")


def test_a_killed_driver_leaves_no_process(story):
    assert [p.cmdline()[:3] for p in story.alive_after_kill if p.is_running()] == []


def test_a_killed_worker_is_replaced_and_its_prompts_are_done_by_the_next(story, database):
    """That no step lacks a prompt is seen in the metrics."""
    messages = [
        message
        for (message,) in database.execute(
            "select l.message from log l join flow_run r on l.flow_run_id = r.id "
            "where r.name = 'rollout-producer-0' order by l.timestamp"
        )
    ]
    ready = "agent loop worker 0 is ready"
    (died,) = (m for m in messages if m.startswith("agent loop worker 0 died: "))
    assert "process is gone" in died
    assert messages.index(ready) < messages.index(died)


def test_records_of_other_processes_are_on_the_pages_of_phases(story, database):
    rows = database.execute(
        "select r.name, l.message from log l join task_run r on l.task_run_id = r.id "
        "where l.message like '[replica-0] %'"
    ).fetchall()
    woken = [name for name, message in rows if "woken by request" in message]
    assert woken
    assert all(name.startswith("step-") for name in woken)


def test_each_attempt_goes_on_after_the_last_checkpoint(run):
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt.get("outcome") for attempt in attempts] == [None, "finished"]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    # 0 is the start of attempt 1; attempt 2 starts from checkpoint 2, validates and reports it.
    assert steps == [0, 1, 2, 3, 4]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert (run / "global_step_2" / "trainer.json").exists()


def test_prefect_shows_how_each_attempt_ended_and_what_a_person_reads(story, database):
    states = database.execute(
        "select r.state_name from flow_run r join flow f on r.flow_id = f.id "
        "where f.name = 'train' order by r.start_time"
    ).fetchall()
    # Nobody was left to say that the killed one crashed.
    assert [state for (state,) in states] == ["Running", "Completed"]
    artifacts = database.execute("select key, type, data from artifact").fetchall()
    progress = [data for key, kind, data in artifacts if kind == "progress"]
    assert float(progress[-1]) == 100.0
    tables = {key: data for key, kind, data in artifacts if kind == "table"}
    assert {"metrics", "generations"} <= tables.keys()
    assert [row["step"] for row in json.loads(json.loads(tables["metrics"]))] == [2, 3, 4]
    events = {name for (name,) in database.execute("select event from events").fetchall()}
    assert {"rollflow.step.completed", "rollflow.checkpoint.saved", "rollflow.run.finished"} <= (
        events
    )


def test_the_model_is_trained_and_loads_as_a_hugging_face_folder(run, project):
    trained = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(project.root / "models/tiny", dtype=torch.float32)
    changes = [
        (a - b).detach().abs().max().item()
        for a, b in zip(trained.parameters(), base.parameters(), strict=True)
    ]
    # AdamW moves a weight by about lr a step at most: 4 steps of 1e-3.
    assert 1e-5 < max(changes) < 5e-3
    assert AutoTokenizer.from_pretrained(run / "model").chat_template


def test_metrics_tell_an_on_policy_run(run):
    by_step = read_metrics(run / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        metrics = by_step[step]
        # One optimizer step per step from fresh weights: the ratio is 1 and nothing is clipped.
        assert metrics["actor/pg_clipfrac"] == 0.0
        assert abs(metrics["actor/ppo_kl"]) < 1e-6
        assert metrics["training/prompts_fed"] == 4
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        assert 0 < metrics["training/rollout_logp_diff_mean"] <= 1e-5
        assert metrics["training/rollout_logp_alarm"] == 0
        assert 0 <= metrics["critic/score/mean"] <= 1
    # Attempt 1 published version 3 for a step 3 that is lost: it is never given to other weights.
    versions = [by_step[step]["checkpoint_engine/version"] for step in range(1, STEPS + 1)]
    assert versions == [1, 2, 4, 5]
    assert [s for s, m in by_step.items() if "val-aux/accuracy" in m] == [0, 2, 4]
    assert all(by_step[s]["val-aux/num_prompts"] == 16 for s in (0, 2, 4))


def test_curves_and_generations_before_and_after_are_there(run):
    assert {path.name for path in (run / "curves").iterdir()} == {"reward.png", "accuracy.png"}
    for step in (0, 2, STEPS):
        lines = [
            json.loads(line) for line in (run / "generations" / f"step-{step:04d}.jsonl").open()
        ]
        assert len(lines) == 16
        assert all(line["responses"][0] != "" and line["error"] is None for line in lines)
    assert list((run / "tensorboard").iterdir())


def test_prefect_shows_one_page_per_step_and_one_task_run_per_phase(story, database):
    flows = database.execute("select name, state_name from flow_run order by start_time").fetchall()
    pages = [name for name, state in flows if name.startswith("step-") and state == "Completed"]
    # Attempt 1 ended while it left the page of step 3.
    assert pages[:2] == ["step-0001", "step-0002"]
    assert pages[-2:] == ["step-0003", "step-0004"]
    assert set(pages) == {"step-0001", "step-0002", "step-0003", "step-0004"}
    names = [name for name, _ in flows]
    assert names.count("rollout-producer-0") == 2
    assert names.count("start-after-0000") == 1
    assert names.count("start-after-0002") == 1
    tasks = [
        name
        for (name,) in database.execute(
            "select name from task_run where state_name = 'Completed' order by start_time"
        )
    ]
    of_step_1 = [name for name in tasks if name.startswith("step-0001/")]
    assert of_step_1 == [f"step-0001/{phase}" for phase in [*PHASES, "update_weights"]]
    of_step_4 = [name.removeprefix("step-0004/") for name in tasks if name.startswith("step-0004/")]
    assert of_step_4[-13:] == [*PHASES, "save_checkpoint", "update_weights", "validate"]


def test_the_console_says_where_everything_is(run, story):
    text = story.text
    assert f"step    {STEPS}/{STEPS}" in text
    for expected in (str(run / "model"), "accuracy before", "accuracy after", "rollflow ui"):
        assert expected in text


def test_what_the_run_leaves_draws_its_timeline(run, project):
    timeline = read_timeline(run, first=3, last=4)
    names = [span.name for span in timeline.phases if span.step == 3]
    # Replicas are put to sleep in a hook, which has a time of its own.
    in_hooks = {"sleep_replicas": "on_sample_end"}
    assert names[:-1] == [in_hooks.get(phase, phase) for phase in PHASES]
    assert names[-1] == "on_step_end"
    # In sync mode a step's prompts are generated while its batch is waited for.
    (wait,) = [s for s in timeline.phases if s.name == "sample_batch" and s.step == 3]
    of_step_3 = [span for span in timeline.prompts if span.step == 3]
    assert of_step_3
    assert all(wait.begin - 1 < span.end < wait.end + 1 for span in of_step_3)
    code, text = project.run("timeline", run.name, "--steps", "3-4", "--out", str(run / "t.png"))
    assert (code, (run / "t.png").read_bytes()[:4]) == (0, b"\x89PNG"), text


def test_nothing_is_left_in_shared_memory(run):
    deadline, snapshots = time.monotonic() + 10, snapshot_root(run).name
    while time.monotonic() < deadline:
        left = [name for name in os.listdir("/dev/shm") if run.name in name or name == snapshots]
        if not left:
            break
        time.sleep(0.5)
    assert left == []
