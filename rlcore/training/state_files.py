"""Files of torch's distributed checkpoint with the bytes of the tensors as they lie in memory.

torch's own file writer packs every tensor as an archive of its own by way of Python, which takes
two to three times as long as writing the bytes. Planning (who writes which part of a tensor, who
reads what) and the metadata file are torch's.

    rank-R.bin   the parts that rank R writes, one after the other, each at a multiple of ALIGNMENT
    .metadata    torch's: names, shapes, and the `Place` of every part
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlcore.errors import CheckpointError

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a tensor lies."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the part."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateWriter(FileSystemWriter):
    """Writes the parts of one rank to one file, which is on disk when `write_data` returns.

    A file that is there is written over, not replaced: see rlcore/trainer/snapshots.py.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives to this rank."""
        name = f"rank-{self.rank or 0}.bin"
        path = Path(self.path) / name
        results: list[WriteResult] = []
        with path.open("r+b" if path.exists() else "wb") as file:
            for item in plan.items:
                tensor = _data(planner, item)
                file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                place = Place(name, file.tell(), tensor.dtype, tuple(tensor.shape))
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
                results.append(WriteResult(item.index, place.num_bytes, place))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class StateReader(FileSystemReader):
    """Reads what `StateWriter` wrote, by mapping the files into memory."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for into the tensors of the planner.

        Raises:
            CheckpointError: a file is shorter than the metadata say.
        """
        files: dict[str, Tensor] = {}
        for item in plan.items:
            place: Place = self.storage_data[item.storage_index]
            if place.file not in files:
                files[place.file] = _mapped(Path(self.path) / place.file)
            target = planner.resolve_tensor(item).detach()
            target.copy_(_part(files[place.file], place, item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _data(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
    return tensor.detach().cpu().contiguous()


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, read when they are used."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _part(content: Tensor, place: Place, item: ReadItem) -> Tensor:
    """Return the section of a stored part that `item` asks for."""
    stored = content[place.offset : place.offset + place.num_bytes]
    if stored.numel() != place.num_bytes:
        raise CheckpointError(
            f"{place.file} ends after {content.numel()} bytes; {item.storage_index.fqn} needs "
            f"{place.num_bytes} from {place.offset}"
        )
    tensor = stored.view(place.dtype).view(place.shape)
    for dimension, (start, length) in enumerate(
        zip(item.storage_offsets, item.lengths, strict=True)
    ):
        tensor = tensor.narrow(dimension, start, length)
    return tensor
