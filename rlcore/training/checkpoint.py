"""The training worker's part of a checkpoint, and the export as a Hugging Face folder.

    model.safetensors    float32 weights, tied ones once
    counters.json        format, progress with stored metrics, weight version
    optimizer.pt         AdamW's state and the random state (read with weights_only=True)

The caller stages and renames the folder; every file is on disk when `write_checkpoint` returns.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlcore.errors import CheckpointError

FORMAT_VERSION = 1
WEIGHTS, COUNTERS, OPTIMIZER = "model.safetensors", "counters.json", "optimizer.pt"
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)


def write_checkpoint(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, counters: dict[str, Any]
) -> None:
    """Write weights, optimizer, random state and counters to `folder`.

    Raises:
        CheckpointError: it cannot be written.
    """
    training = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_untied(model), folder / WEIGHTS)
        torch.save(training, folder / OPTIMIZER)
        content = {"format_version": FORMAT_VERSION, **counters}
        (folder / COUNTERS).write_text(json.dumps(content), encoding="utf-8")
        for name in (WEIGHTS, OPTIMIZER, COUNTERS):
            _flush(folder / name)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def read_checkpoint(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load weights, optimizer and random state, and return the counters.

    Raises:
        CheckpointError: incomplete, of another format or of another model.
    """
    try:
        counters = json.loads((folder / COUNTERS).read_text(encoding="utf-8"))
        training = torch.load(folder / OPTIMIZER, weights_only=True)
    except (OSError, json.JSONDecodeError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    found = counters.pop("format_version", None)
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: format {found}, this version reads {FORMAT_VERSION}; use the rollflow "
            "version that wrote it"
        )
    read_weights(folder, model)
    optimizer.load_state_dict(training["optimizer"])
    torch.set_rng_state(training["rng"])
    return counters


def read_weights(folder: Path, model: PreTrainedModel) -> None:
    """Load the weights of a checkpoint into a model of the same architecture.

    Raises:
        CheckpointError: they cannot be read, or are of another model.
    """
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    own = _untied(model)
    _check_same_model(folder, weights, own)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def export_model(folder: Path, model: PreTrainedModel, source: Path) -> None:
    """Write the model in the type of `source`, with the tokenizer files of that folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    # The type the base model was stored in: float32 copies of bf16 models help nobody.
    dtype = AutoConfig.from_pretrained(source).dtype or torch.float32
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in _untied(model).items()
    }
    config = model.config
    kept = config.dtype
    config.dtype = dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(folder)
        for pattern in TOKENIZER_PATTERNS:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise CheckpointError(f"{folder}: the model cannot be written: {error}") from error
    finally:
        config.dtype = kept


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict with every storage once."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.detach().contiguous()
            seen.add(tensor.data_ptr())
    return tensors


def _check_same_model(folder: Path, saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for name in sorted(saved.keys() | own.keys()):
        shapes = [list(side[name].shape) if name in side else None for side in (saved, own)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{folder}: is of another model: {name} is {shapes[0] or 'missing'} there and "
                f"{shapes[1] or 'missing'} in the model of this run"
            )


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
