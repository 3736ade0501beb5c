"""The shared segment: what is written is read, and nothing else is taken for it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.checkpoint_engine.buffer import WeightBuffer
from rlcore.checkpoint_engine.layout import ALIGNMENT
from rlcore.checkpoint_engine.segment import read_tensors, write_tensors
from rlcore.errors import ActorUnavailableError, WeightSyncError


def tensors():
    torch.manual_seed(0)
    tied = torch.randn(3, 5)
    return [
        ("embed", tied),
        ("norm", torch.randn(7)),
        ("nothing", torch.empty(0, 4)),
        ("scalar", torch.tensor(2.5)),
        ("steps", torch.tensor([16777217, -3])),
        ("head", tied),
        ("transposed", torch.randn(4, 3).t()),
    ]


def test_a_buffer_gives_up_two_sets_of_weights_and_then_itself(tmp_path):
    meta = write_tensors(tmp_path / "w", [("w", torch.ones(1000))], "float32", version=1)
    buffer = WeightBuffer()
    buffer.discard()  # nothing is held yet
    for _ in range(2):
        buffer.begin(meta)
        assert len(buffer.data) == meta.num_bytes
        held = buffer.data
        buffer.discard()
        held[:] = 7  # as a transfer that is late does: the memory is still there
    with pytest.raises(ActorUnavailableError, match=r"after 2 transfers .* 8000 bytes"):
        buffer.begin(meta)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reads_back_every_tensor_in_the_wire_type(tmp_path: Path, dtype: str):
    meta = write_tensors(tmp_path / "w", tensors(), dtype, version=4)
    got = dict(read_tensors(meta))
    assert list(got) == [name for name, _ in tensors()]
    for name, tensor in tensors():
        want = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert torch.equal(got[name], want) and got[name].dtype == want.dtype
    assert meta.version == 4
    assert all(entry["offset"] % ALIGNMENT == 0 for entry in meta.tensors)


def test_tied_tensors_are_stored_once_and_equal_ones_twice(tmp_path: Path):
    entries = {e["name"]: e for e in write_tensors(tmp_path / "w", tensors(), "float32", 1).tensors}
    assert entries["embed"]["offset"] == entries["head"]["offset"]
    twin = [("a", torch.ones(2)), ("b", torch.ones(2))]
    a, b = write_tensors(tmp_path / "v", twin, "float32", 1).tensors
    assert a["offset"] != b["offset"]


def test_the_segment_is_reused_in_place(tmp_path: Path):
    path = tmp_path / "w"
    write_tensors(path, [("a", torch.zeros(1000))], "float32", 1)
    before = os.stat(path)
    meta = write_tensors(path, [("a", torch.full((10,), 3.0))], "float32", 2)
    after = os.stat(path)
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert dict(read_tensors(meta))["a"].tolist() == [3.0] * 10


def test_a_reader_cannot_change_the_segment(tmp_path: Path):
    meta = write_tensors(tmp_path / "w", [("a", torch.zeros(4))], "float32", 1)
    next(iter(read_tensors(meta)))[1].fill_(9.0)
    assert dict(read_tensors(meta))["a"].tolist() == [0.0] * 4


def test_other_bytes_are_refused(tmp_path: Path):
    path = tmp_path / "w"
    old = write_tensors(path, [("a", torch.zeros(4))], "float32", 1)
    write_tensors(path, [("a", torch.ones(4))], "float32", 2)
    with pytest.raises(WeightSyncError, match=r"weight version 1.*overwritten or damaged"):
        list(read_tensors(old))
    renamed = replace(old, tensors=[{**old.tensors[0], "name": "b"}])
    with pytest.raises(WeightSyncError, match="checksum"):
        list(read_tensors(renamed))


def test_missing_and_short_segments_are_refused(tmp_path: Path):
    meta = write_tensors(tmp_path / "w", [("a", torch.zeros(64))], "float32", 1)
    with pytest.raises(WeightSyncError, match="is missing"):
        list(read_tensors(replace(meta, path=str(tmp_path / "gone"))))
    os.truncate(tmp_path / "w", 100)
    with pytest.raises(WeightSyncError, match="has 100 bytes, published were 256"):
        list(read_tensors(meta))


def test_names_and_types_are_checked(tmp_path: Path):
    with pytest.raises(WeightSyncError, match="two tensors are called 'a'"):
        write_tensors(tmp_path / "w", [("a", torch.ones(1)), ("a", torch.ones(1))], "float32", 1)
    with pytest.raises(WeightSyncError, match="not a floating point type"):
        write_tensors(tmp_path / "w", [("a", torch.ones(1))], "int64", 1)
    with pytest.raises(WeightSyncError, match="unknown tensor type 'float31'"):
        write_tensors(tmp_path / "w", [("a", torch.ones(1))], "float31", 1)
