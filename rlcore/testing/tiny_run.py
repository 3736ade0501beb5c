"""The tiny preset with its model and data in a folder of the caller's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig, load_config
from rlcore.data.prepare import prepare_tiny


def tiny_config(root: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Prepare the tiny model and data under `root` and return the tiny preset for them.

    Args:
        root: Folder for models/, data/, cache/ and runs/; what is there already is used.
        overrides: Dotted key to value, over the preset and the paths.
    """
    model_folder, data_folder = prepare_tiny(root)
    return load_config(
        "grpo-tiny",
        {
            "actor_rollout_ref.model.path": str(model_folder),
            "data.train_files": str(data_folder / "train.parquet"),
            "data.val_files": str(data_folder / "test.parquet"),
            "data.cache_dir": str(root / "cache"),
            "trainer.runs_root": str(root / "runs"),
            **(overrides or {}),
        },
    )
