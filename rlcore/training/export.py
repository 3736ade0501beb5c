"""A run's model as a Hugging Face folder: the one that was exported, or that of a checkpoint."""

import json
import shutil
from pathlib import Path

from rlcore.errors import CheckpointError
from rlcore.trainer.checkpoint import CheckpointStore
from rlcore.trainer.run_folder import RunFolder


def export_model(run: Path, out: Path, *, step: int | None) -> Path:
    """Write the model to `out`, whole or not at all.

    Args:
        run: The run folder.
        out: Must not exist.
        step: Checkpoint to take; None: the exported model, else the newest checkpoint.

    Raises:
        CheckpointError: `out` exists, or the run has no such model.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; choose another folder")
    staged = out.with_name(f".{out.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if step is None and (run / "model" / "config.json").is_file():
        shutil.copytree(run / "model", staged)
    else:
        _from_checkpoint(RunFolder.open(run), staged, step)
    staged.rename(out)
    return out


def _from_checkpoint(folder: RunFolder, out: Path, step: int | None) -> None:
    store = CheckpointStore(folder)
    checkpoint = store.latest() if step is None else store.at(step)
    if checkpoint is None:
        raise CheckpointError(f"run {folder.run_id} has neither a model nor a checkpoint yet")
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    source = config["actor_rollout_ref"]["model"]

    import torch

    from rlcore.pretrained import load_causal_lm
    from rlcore.training import checkpoint as files

    model = load_causal_lm(
        source["path"], torch.float32, trust_remote_code=source["trust_remote_code"]
    )
    files.read_weights(checkpoint.actor_path, model)
    files.export_model(out, model, Path(source["path"]))
