"""Evaluate a model or the result of a run on a preset's held-out prompts."""

from pathlib import Path
from typing import Any

from prefect import State, flow

from flows.train import train
from rlcore.config import load_config
from rlcore.errors import CheckpointError
from tasks.parameters import PartialConfig, as_tree


@flow(name="evaluate-policy", retries=0, persist_result=False)
async def evaluate_policy(
    model: str,
    preset: str,
    overrides: dict[str, Any] = {},  # noqa: B006  the form shows an object; never changed
    config: PartialConfig | None = None,
) -> dict[str, Any] | State:
    """Return accuracy with standard error, and where the generations lie.

    Sampling is `val_kwargs` of the preset: greedy by default.

    Args:
        model: A Hugging Face folder, or the id of a run whose exported model is meant.
        preset: Names the held-out files, the sampling and the reward.
        overrides: Dotted key to value, over preset and config.
        config: Partial configuration tree over the preset; only what is set counts.

    Raises:
        CheckpointError: `model` is neither.
    """
    resolved = load_config(preset, overrides, as_tree(config))
    exported = Path(resolved.trainer.runs_root) / model / "model"
    path = exported if exported.is_dir() else Path(model)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{model}: neither a model folder (no config.json) nor a run with an exported model "
            f"(no {exported})"
        )
    evaluation = {
        **overrides,
        "actor_rollout_ref.model.path": str(path),
        "trainer.val_only": True,
        # A run of its own, wherever the preset would have continued a training run.
        "trainer.default_local_dir": None,
        "trainer.resume_mode": "disable",
        "trainer.experiment_name": f"evaluate-{resolved.trainer.experiment_name}",
    }
    return await train(preset, evaluation, config)
