"""A backend of the user's, in a file that the configuration names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.config import load_config
from rlcore.errors import ConfigError
from rlcore.rollout.staged_weights import StagedWeights
from rlcore.testing.replicas import FakeReplica
from rlcore.types import CallKey, WeightMeta
from rlcore.user_code import load_user_modules

BACKEND = """
from dataclasses import replace

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, WEIGHT_RECEIVERS, load_each
from rlcore.checkpoint_engine.buffer import split_buckets
from rlcore.checkpoint_engine.segment import map_segment


@CHECKPOINT_ENGINES.register("by_hand")
class Engine:
    def __init__(self, settings):
        self.settings = settings

    def push(self, key, meta, replicas):
        transport = self.settings.transport("by_hand", note=self.settings.options["note"])
        meta = replace(meta, transport=transport)
        return load_each(key, dict.fromkeys(replicas, meta), replicas)


@WEIGHT_RECEIVERS.register("by_hand")
class Receiver:
    def receive(self, meta, buffer):
        assert meta.transport["note"] == "hello"
        data = map_segment(meta)
        for bucket in split_buckets(meta.num_bytes, meta.transport["bucket_bytes"]):
            buffer.data[bucket.start : bucket.end] = data[bucket.start : bucket.end]
            buffer.filled(bucket)
            yield bucket
"""
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")


class Source:
    def __init__(self, path: Path) -> None:
        self.path = path

    def publish_weights(self, key: CallKey) -> WeightMeta:
        return write_tensors(self.path, [("weight", torch.full((2, 3), 4.0))], "float32", 1)


class RealReplica(FakeReplica):
    """Receives as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.staged = StagedWeights(self.model)

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        found = self.staged.stage(meta)
        return super().load_weights(key, meta) | {"checksum": found}

    def commit_weights(self, key: CallKey, version: int) -> None:
        super().commit_weights(key, version)
        self.staged.commit(version)


def test_a_file_of_the_users_brings_a_backend(tmp_path):
    path = tmp_path / "my_backend.py"
    path.write_text(BACKEND)
    config = load_config(
        "grpo-tiny",
        [
            "actor_rollout_ref.rollout.checkpoint_engine.backend=by_hand",
            f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={path}",
            "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.by_hand.note=hello",
        ],
    )
    assert config.user_modules == (str(path),)
    with pytest.raises(ConfigError, match="unknown checkpoint engine 'by_hand'"):
        CheckpointEngineManager(Source(tmp_path / "w"), {}, backend="by_hand")
    load_user_modules(config.user_modules)
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    replica = RealReplica()
    manager = CheckpointEngineManager(
        Source(tmp_path / "w"), {"r": replica}, backend=engine.backend, key=KEY,
        settings=TransferSettings(options=engine.engine_kwargs["by_hand"]),
    )  # fmt: skip
    assert manager.update_weights(1)["version"] == 1
    assert replica.model.weight.tolist() == [[4.0] * 3] * 2


def test_a_backend_that_nothing_registers_is_refused():
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    names = "gloo, kimi_ckpt_engine, mooncake, naive, nccl, shm"
    with pytest.raises(ConfigError, match=rf"(?s)telegraph.*{names}"):
        load_config("grpo-tiny", [f"{key}=telegraph"])
