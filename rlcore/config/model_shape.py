"""Sizes of a model in Hugging Face format, read from the headers of its files alone."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEADER_LIMIT = 100 * 1024**2
"""A header is JSON of at most this size (the format's own limit)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What memory depends on."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


def read_model_shape(folder: str | Path) -> ModelShape | None:
    """Return the shape of the model in `folder`, or None where its files do not tell."""
    path = Path(folder)
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        parameters = sum(_num_elements(file) for file in sorted(path.glob("*.safetensors")))
        if not parameters:
            return None
        heads = int(values["num_attention_heads"])
        hidden = int(values["hidden_size"])
        return ModelShape(
            num_parameters=parameters,
            num_layers=int(values["num_hidden_layers"]),
            hidden_size=hidden,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_size=int(values.get("head_dim") or hidden // heads),
            vocab_size=int(values["vocab_size"]),
        )
    # What is wrong with a model folder is told by `check --data`; here it means "unknown".
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _num_elements(file: Path) -> int:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _HEADER_LIMIT:
            raise ValueError(f"{file}: no safetensors header")
        header: dict[str, Any] = json.loads(stream.read(size))
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )
