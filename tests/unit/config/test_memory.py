"""Sizes of a model from its files' headers, and what a run takes by them."""

import json
import struct

import pytest

from rlcore.config import load_config
from rlcore.config.memory import memory_parts, micro_batch_tokens
from rlcore.config.model_shape import ModelShape, read_model_shape
from rlcore.config.report import plan

A = "actor_rollout_ref."


def write_model(folder, shapes, **config):
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "vocab_size": 100,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(values))
    header = {"__metadata__": {}}
    header |= {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def test_the_shape_is_read_from_headers(tmp_path):
    write_model(tmp_path, {"a": [10, 20], "b": [5], "scalar": []})
    assert read_model_shape(tmp_path) == ModelShape(
        num_parameters=206,  # 10 x 20 + 5 + 1
        num_layers=3,
        hidden_size=32,
        num_kv_heads=2,
        head_size=8,
        vocab_size=100,
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"abc"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 16),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_folder_that_does_not_tell_is_unknown(tmp_path, spoil):
    write_model(tmp_path, {"a": [2]})
    spoil(tmp_path)
    assert read_model_shape(tmp_path) is None
    memory = plan(load_config("grpo-tiny", [f"{A}model.path={tmp_path}"]))["memory"]
    assert list(memory) == ["unknown"]


def test_parts_are_the_sums_by_hand(tmp_path):
    write_model(tmp_path, {"a": [1000]})
    config = load_config("grpo-tiny", [f"{A}rollout.num_replicas=2"])
    shape = read_model_shape(tmp_path)
    parts = memory_parts(config, shape)
    assert micro_batch_tokens(config) == 1152  # 16 trajectories x (64 + 8), below 4096
    assert parts == {
        "weights": 4000,
        "gradients": 4000,
        "adamw_moments": 8000,
        "activations_estimate": 1152 * 3 * 32 * 68,
        "logits_and_their_gradient": 2 * 16 * 8 * 100 * 4,
        "engine_weights": 2 * 4 * 1000,
        # 2 replicas x 16 slots x 72 tokens x (keys and values, 3 layers, 2 heads of 8, 4 bytes)
        "engine_kv_cache": 2 * 16 * 72 * (2 * 3 * 2 * 8 * 4),
        "published_weights": 4000,
        # two, each of weights and both moments
        "snapshots": 2 * 3 * 4000,
    }
    without = memory_parts(load_config("grpo-tiny", ["trainer.snapshots=false"]), shape)
    assert "snapshots" not in without


def test_parts_of_ranks_reference_critic_and_adapters(tmp_path):
    write_model(tmp_path, {"a": [1000]})
    shape = read_model_shape(tmp_path)
    ppo = ["algorithm.adv_estimator=gae", f"{A}actor.use_kl_loss=true"]
    parts = memory_parts(load_config("grpo-tiny", [*ppo, "trainer.n_gpus_per_node=2"]), shape)
    assert (parts["weights"], parts["gradients"], parts["adamw_moments"]) == (2000, 2000, 4000)
    assert parts["reference_weights"] == 2000
    assert parts["critic_weights_gradients_moments"] == 8000
    assert parts["published_weights"] == 4000
    assert parts["snapshots"] == 2 * 3 * 8000  # of policy and critic, all ranks together
    parts = memory_parts(load_config("grpo-tiny", [*ppo, f"{A}model.lora_rank=4"]), shape)
    assert (parts["weights"], parts["gradients"], parts["adamw_moments"]) == (4000, 0, 0)
    assert parts["snapshots"] == 2 * 3 * 4000  # the critic's; adapters are counted as nothing
    assert "reference_weights" not in parts


def test_a_teacher_has_its_own_size(tmp_path):
    write_model(tmp_path / "policy", {"a": [1000]})
    write_model(tmp_path / "teacher", {"a": [3000]})
    shape, teacher = (read_model_shape(tmp_path / name) for name in ("policy", "teacher"))
    path = "distillation.teacher_models.teacher_model.model_path"
    asked = ["distillation.enabled=true", f"{path}={tmp_path}/teacher"]
    asked += [f"{A}model.path={tmp_path}/policy", f"{A}model.lora_rank=4"]
    config = load_config("grpo-tiny", [*asked, "trainer.n_gpus_per_node=2"])
    assert memory_parts(config, shape, teacher)["teacher_weights"] == 6000
    assert memory_parts(config, shape)["teacher_weights"] == 2000
    assert "teacher_weights" not in memory_parts(load_config("grpo-tiny"), shape)
    told = plan(load_config("grpo-tiny", asked))["memory"]
    assert told["teacher_weights_mib"] == 1


def test_micro_batches_by_rows(tmp_path):
    config = load_config(
        "grpo-tiny", [f"{A}actor.use_dynamic_bsz=false", f"{A}actor.ppo_micro_batch_size_per_gpu=2"]
    )
    assert micro_batch_tokens(config) == 144  # 2 x 72
