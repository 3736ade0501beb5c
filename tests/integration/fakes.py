"""Stand-ins for a training and an evaluation, without Ray: they leave what the real ones leave."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext

NUM_PROMPTS = 16


def left_by(kind: str) -> Path:
    """Make the folder of a run that this flow run is the attempt of."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    flow_run_id = str(context.flow_run.id)
    folder = Path("runs") / f"{kind}-{flow_run_id[:8]}"
    (folder / "generations").mkdir(parents=True)
    attempt = {"attempt": 1, "flow_run_id": flow_run_id, "outcome": "finished"}
    record = {"run_id": folder.name, "attempts": [attempt]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@flow(name="fake-train", persist_result=False)
def fake_train(preset: str, overrides: dict[str, Any]) -> None:
    """Train for as long as there is a file `hold`."""
    while Path("hold").exists():
        time.sleep(0.2)
    folder = left_by("trained")
    (folder / "asked.json").write_text(json.dumps(overrides))
    shutil.copytree(Path("models/tiny").resolve(), folder / "model")


@flow(name="fake-evaluate", persist_result=False)
def fake_evaluate(model: str, preset: str, overrides: dict[str, Any]) -> None:
    """Find that what was trained here is always right, and everything else always wrong."""
    folder = left_by("evaluated")
    rows = [{"index": i, "acc": float("trained-" in model)} for i in range(NUM_PROMPTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "generations" / "step-0000.jsonl").write_text(lines)
