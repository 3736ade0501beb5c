"""Evaluate a model or the result of a run on a preset's held-out prompts."""

from pathlib import Path
from typing import Any

from prefect import State, flow

from flows.train import train
from rlcore.config import load_config
from rlcore.errors import CheckpointError


@flow(name="evaluate_policy", retries=0, persist_result=False)
async def evaluate_policy(
    model: str, preset: str, overrides: dict[str, Any] | None = None
) -> dict[str, Any] | State:
    """Return accuracy with standard error, and where the generations lie.

    Sampling is `val_kwargs` of the preset: greedy by default.

    Args:
        model: A Hugging Face folder, or the id of a run whose exported model is meant.
        preset: Names the held-out files, the sampling and the reward.
        overrides: Dotted key to value, over the preset.

    Raises:
        CheckpointError: `model` is neither.
    """
    config = load_config(preset, overrides or {})
    exported = Path(config.trainer.runs_root) / model / "model"
    path = exported if exported.is_dir() else Path(model)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{model}: neither a model folder (no config.json) nor a run with an exported model "
            f"(no {exported})"
        )
    evaluation = {
        **(overrides or {}),
        "actor_rollout_ref.model.path": str(path),
        "trainer.val_only": True,
        # A run of its own, wherever the preset would have continued a training run.
        "trainer.default_local_dir": None,
        "trainer.resume_mode": "disable",
        "trainer.experiment_name": f"evaluate-{config.trainer.experiment_name}",
    }
    return await train(preset, evaluation)
