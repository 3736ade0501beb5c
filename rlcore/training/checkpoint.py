"""The training worker's part of a checkpoint, and the export as a Hugging Face folder.

    state/                 float32 weights and AdamW's moments, in torch's distributed format:
                           written by any number of ranks, read by any other number
    counters.json          format, progress with stored metrics, weight version
    random-RANK.pt         random state of each rank (read with weights_only=True)

torch reads the index of `state` by pickle: a checkpoint of somebody you do not trust runs his code.

Names in `state`: `model.NAME` for weights, `optimizer.NAME.MOMENT` for what the optimizer holds of
a parameter. Tied weights are there once. The caller stages and renames the folder; every file is on
disk when `write_checkpoint` returns.
"""

import json
import os
import pickle
import shutil
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, PreTrainedModel

from rlcore.errors import CheckpointError
from rlcore.training.lora import merged_tensors
from rlcore.training.ranks import Ranks
from rlcore.training.state_files import StateReader, StateWriter

FORMAT_VERSION = 2
STATE, COUNTERS, RANDOM = "state", "counters.json", "random-{}.pt"
EXPORTED = "model.safetensors"
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)
MOMENTS = ("exp_avg", "exp_avg_sq")
UNREADABLE = (
    OSError,
    EOFError,
    json.JSONDecodeError,
    pickle.UnpicklingError,
    RuntimeError,
    CheckpointException,
)
"""What damaged files make torch and json raise."""
WEIGHT = "model."
"""Beginning of the names of weights in `state`."""


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that training changes, by name; frozen ones are the base model's."""
    return {
        f"{WEIGHT}{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what training changes, by name: weights, and the optimizer's state once it has one."""
    state = trained_weights(model)
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{moment}"] = value
    return state


def write_checkpoint(
    folder: Path, state: dict[str, Tensor], counters: dict[str, Any], ranks: Ranks
) -> None:
    """Write state, random state and counters to `folder`; every rank calls it.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            save(dict(state), storage_writer=StateWriter(folder / STATE))
        random = folder / RANDOM.format(ranks.rank)
        torch.save(torch.get_rng_state(), random)
        _flush(random)
        if ranks.is_first:
            content = {"format_version": FORMAT_VERSION, **counters}
            (folder / COUNTERS).write_text(json.dumps(content), encoding="utf-8")
            _flush(folder / COUNTERS)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_reason(error)}") from error


def read_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any]:
    """Load weights, optimizer and random state, and return the counters; every rank calls it.

    Raises:
        CheckpointError: incomplete, of another format or of another model.
    """
    try:
        counters = json.loads((folder / COUNTERS).read_text(encoding="utf-8"))
        _check_format(folder, counters.pop("format_version", None))
        reader = StateReader(folder / STATE)
        saved = reader.read_metadata().state_dict_metadata
        _make_moments(model, optimizer, saved)
        state = trained_state(model, optimizer)
        _check_same_model(folder, saved, state)
        with _quiet():
            load(state, storage_reader=reader)
        random = folder / RANDOM.format(ranks.rank)
        if random.exists():  # fewer ranks may have written it
            torch.set_rng_state(torch.load(random, weights_only=True))
    except UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {_reason(error)}") from error
    return counters


def read_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into a model with the same names and shapes.

    For one process alone, however many ranks wrote it.

    Raises:
        CheckpointError: they cannot be read, or are of another model.
    """
    own = trained_weights(model)
    try:
        reader = StateReader(folder / STATE)
        saved = reader.read_metadata().state_dict_metadata
        weights = {name: saved[name] for name in saved if name.startswith(WEIGHT)}
        _check_same_model(folder, weights, own)
        with _quiet():
            load(own, storage_reader=reader, no_dist=True)
    except UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {_reason(error)}") from error


def export_model(folder: Path, model: PreTrainedModel, source: Path, ranks: Ranks) -> None:
    """Write the model in the type of `source`, with the tokenizer files of that folder.

    Every rank calls it; rank 0 writes.

    Raises:
        CheckpointError: it cannot be written.
    """
    # The type the base model was stored in: float32 copies of bf16 models help nobody.
    stored = AutoConfig.from_pretrained(source).dtype
    dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    named = merged_tensors(model, dtype)
    if not ranks.is_first:
        deque(named, maxlen=0)  # this rank's shards are asked for
        return
    weights = {
        name: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in _untied(dict(named)).items()
    }
    config = model.config
    kept = config.dtype
    config.dtype = dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / EXPORTED, metadata={"format": "pt"})
        config.save_pretrained(folder)
        for pattern in TOKENIZER_PATTERNS:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise CheckpointError(f"{folder}: the model cannot be written: {error}") from error
    finally:
        config.dtype = kept


def _untied(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every storage once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.detach().cpu().contiguous()
            seen.add(tensor.data_ptr())
    return tensors


def _make_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> None:
    """Give the optimizer the tensors that the checkpoint's are loaded into, or none."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if f"optimizer.{name}.{MOMENTS[0]}" not in saved or not parameter.requires_grad:
            continue
        # Where AdamW keeps its step counter: fused ones have it beside the parameter.
        device = parameter.device if optimizer.defaults.get("fused") else "cpu"
        step = torch.zeros((), dtype=torch.float32, device=device)
        moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": step, **moments}


def _check_format(folder: Path, found: Any) -> None:
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: format {found}, this version reads {FORMAT_VERSION}; use the rollflow "
            "version that wrote it"
        )


def _check_same_model(folder: Path, saved: dict[str, Any], own: dict[str, Tensor]) -> None:
    for name in sorted(saved.keys() | own.keys()):
        stored = saved.get(name)
        there = list(stored.size) if isinstance(stored, TensorStorageMetadata) else None
        here = list(own[name].shape) if name in own else None
        if there != here:
            described = ["missing" if shape is None else str(shape) for shape in (there, here)]
            raise CheckpointError(
                f"{folder}: is of another model: {name} is {described[0]} there and "
                f"{described[1]} in the model of this run"
            )


def _reason(error: BaseException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return (
        next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back torch's remark that one process saves alone, and that it overwrites a repeat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
