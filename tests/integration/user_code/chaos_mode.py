"""Mode `chaos`: mode `sync`, in which processes are killed at the beginning of phases.

Which, says `chaos.json` in the run folder: a list of [step, phase, kind]. Each is done once, in the
order of the run: what was struck lies beside it, a file `struck-STEP-PHASE`.
"""

import json
import os
import signal
from pathlib import Path

import psutil

from rlcore.trainer.base import PPOTrainer, register_trainer
from rlcore.trainer.phases import ADD_BATCH, BATCH_PHASES, COMMIT_STEP, SAMPLE_BATCH, SAVE_SNAPSHOT

ACTORS = {
    "executor": "ExecutorActor",
    "training rank": "TrainingWorkerActor",
    "agent loop worker": "AgentLoopWorkerActor",
    "replica": "LLMServerActor",
    "ledger": "LedgerActor",
    "queue host": "QueueHostActor",
}
"""Kind to the class whose name its process has; the driver's number is in run.json."""
KINDS = (*ACTORS, "driver")
PLAN, RAYLET = "chaos.json", "raylet.pid"
DEAD_S = 20.0


def strike(trainer, phase):
    """Kill what the plan names for this phase of the step, if it was not done yet."""
    folder = trainer.folder.path
    for step, name, kind in json.loads((folder / PLAN).read_text()):
        if (step, name) != (trainer.global_steps, phase):
            continue
        try:
            (folder / f"struck-{step}-{phase}").open("x").write(kind)
        except FileExistsError:
            continue
        victims = _victims(folder, kind)
        assert victims, f"there is no {kind}"
        # The one that kills, if it is among them, comes last.
        for process in sorted(victims, key=lambda p: p.pid == os.getpid()):
            process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(victims, timeout=DEAD_S)
        assert not alive, f"{kind} lives: {alive}"


def _victims(folder: Path, kind: str) -> list[psutil.Process]:
    if kind == "driver":
        record = json.loads((folder / "run.json").read_text())
        return [psutil.Process(record["attempts"][-1]["pid"])]
    if kind == "executor" and _is_below_raylet():
        return [psutil.Process()]
    raylet = psutil.Process(int((folder / RAYLET).read_text()))
    return [process for process in raylet.children() if _is(process, ACTORS[kind])]


def _is(process: psutil.Process, actor: str) -> bool:
    try:
        title = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any(part.split(".")[0] == f"ray::{actor}" for part in title)


def _is_below_raylet() -> bool:
    return psutil.Process().name().startswith("ray::")


def _struck(phase):
    plain = getattr(PPOTrainer, phase.method)

    def method(self, *arguments):
        (self.folder.path / RAYLET).write_text(str(os.getppid()))
        strike(self, phase.name)
        return plain(self, *arguments)

    return method


class _Struck(PPOTrainer):
    """Every phase of a step begins with a strike."""


for _phase in (ADD_BATCH, SAMPLE_BATCH, *BATCH_PHASES, SAVE_SNAPSHOT, COMMIT_STEP):
    setattr(_Struck, _phase.method, _struck(_phase))


@register_trainer("chaos")
class ChaosTrainer(_Struck):
    """See the module; what hooks call is struck in the driver, before the call."""

    def on_sample_end(self):
        """As mode `sync`."""
        strike(self, "sleep_replicas")
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self):
        """As mode `sync`."""
        strike(self, "update_weights")
        self.checkpoint_manager.update_weights(self.global_steps)
