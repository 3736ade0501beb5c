"""LoRA adapters that reach the embedded engine alone: as if they had been merged before."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.errors import WeightSyncError
from rlcore.rollout.staged_weights import StagedWeights
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.testing.replicas import FakeReplica
from rlcore.training.lora import adapter_tensors, add_lora, merged_tensors
from rlcore.training.plan import LoraSpec
from rlcore.types import CallKey

SPEC = LoraSpec(rank=4, alpha=6)
SCALE = 1.5
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")
PROMPT = [5, 17, 40, 8, 99, 3]


@pytest.fixture(scope="module")
def adapted(model_folder):
    """A model with an adapter that changes what it says."""
    model = AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.float32)
    add_lora(model, SPEC)
    generator = torch.Generator().manual_seed(5)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            weight = layer.lora_B["default"].weight
            weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    return model


def new_engine(folder, dtype="float32"):
    return TransformersEngine(str(folder), dtype, 16, 256, 1)


def greedy(engine, run, request_of):
    request = request_of("g", PROMPT, max_tokens=20, do_sample=False)
    return run(engine, {0: [request]})["g"]


def write(path, named, version=1, **more):
    return replace(write_tensors(path, named, "auto", version), **more)


def adapter_alone(path, model, version=1):
    return write(path, adapter_tensors(model), version, adapter_scale=SCALE)


def update(engine, meta):
    engine.stage_weights(meta)
    engine.commit_weights(meta.version)


class EngineReplica(FakeReplica):
    """An engine where a replica is expected."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def load_weights(self, key, meta):
        found = self.engine.stage_weights(meta)
        return {"version": meta.version, "num_bytes": meta.num_bytes, "checksum": found}

    def commit_weights(self, key, version):
        super().commit_weights(key, version)
        self.engine.commit_weights(version)


class Source:
    def __init__(self, meta):
        self.meta = meta

    def publish_weights(self, key):
        return self.meta

    def published_weights(self):
        return self.meta


@pytest.mark.parametrize("backend", ["naive", "shm", "gloo"])
def test_alone_it_gives_the_log_probs_of_the_merged_weights_and_of_peft(
    model_folder, adapted, run, request_of, tmp_path, backend
):
    alone, merged = (new_engine(model_folder) for _ in range(2))
    before = greedy(alone, run, request_of)
    meta = adapter_alone(tmp_path / "adapter", adapted)
    whole = write(tmp_path / "whole", merged_tensors(adapted))
    assert meta.num_bytes < whole.num_bytes / 2
    settings = TransferSettings(bucket_bytes=4 << 20)
    for engine, published in ((alone, meta), (merged, whole)):
        manager = CheckpointEngineManager(
            Source(published), {"r": EngineReplica(engine)}, backend=backend, settings=settings,
            key=KEY,
        )  # fmt: skip
        assert manager.update_weights(1)["bytes"] == published.num_bytes
    first, second = (greedy(engine, run, request_of) for engine in (alone, merged))
    assert first.weight_versions == [1] * 20
    assert first.token_ids == second.token_ids != before.token_ids
    assert first.log_probs == pytest.approx(second.log_probs, abs=1e-6)
    assert first.log_probs == pytest.approx(by_peft(model_folder, tmp_path, adapted, first))


def by_peft(folder, tmp_path, adapted, output):
    """Log-probs of the same tokens by an adapter that peft itself has written and read."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    made = get_peft_model(base, config)
    mine = {n: t for n, t in adapted.state_dict().items() if ".lora_" in n}
    found = made.load_state_dict(
        {f"base_model.model.{n}": t for n, t in mine.items()}, strict=False
    )
    assert mine and not found.unexpected_keys
    made.save_pretrained(str(tmp_path / "peft"))
    fresh = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    fresh = PeftModel.from_pretrained(fresh, str(tmp_path / "peft"))
    ids = torch.tensor([PROMPT + output.token_ids])
    with torch.inference_mode():
        logits = fresh(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == output.token_ids
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])
    return pytest.approx(log_probs[:, 0].tolist(), abs=1e-5)


def test_every_update_is_of_the_model_folder_and_not_of_the_one_before(
    model_folder, adapted, run, request_of, tmp_path
):
    engine, once = new_engine(model_folder), new_engine(model_folder)
    start = greedy(engine, run, request_of)
    for version in (1, 2, 3):
        update(engine, adapter_alone(tmp_path / "a", adapted, version))
    update(once, adapter_alone(tmp_path / "a", adapted, 3))
    assert greedy(engine, run, request_of).log_probs == greedy(once, run, request_of).log_probs
    nothing = [(name, torch.zeros_like(tensor)) for name, tensor in adapter_tensors(adapted)]
    update(engine, write(tmp_path / "a", nothing, 4, adapter_scale=SCALE))
    assert greedy(engine, run, request_of).log_probs == start.log_probs


def test_in_bfloat16_it_is_merged_before_it_is_rounded(model_folder, adapted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.bfloat16)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    staged = StagedWeights(model)
    staged.stage(adapter_alone(tmp_path / "a", adapted))
    staged.commit(1)
    name = "model.layers.0.self_attn.q_proj"
    down, up = (dict(adapter_tensors(adapted))[f"{name}.lora_{s}.weight"] for s in "AB")
    expected = base[f"{name}.weight"].float() + SCALE * (up @ down)
    assert torch.equal(model.state_dict()[f"{name}.weight"], expected.bfloat16())
    assert torch.equal(model.state_dict()["model.norm.weight"], base["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda named: named[1:], "lora_B.weight without its other half"),
        (lambda named: [("x.lora_A.weight", named[0][1]), *named[1:]], "no such linear layer"),
        (lambda named: [("model.norm.weight", named[0][1]), *named[1:]], "no such linear layer"),
        (lambda named: [(named[0][0], torch.zeros(4, 3)), *named[1:]], r"shape \[4, 3\]"),
        (
            lambda named: [
                *named,
                ("lm_head.lora_A.weight", torch.zeros(4, 1)),
                ("lm_head.lora_B.weight", torch.zeros(1, 4)),
            ],
            "is tied to another",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused(model_folder, adapted, tmp_path, change, words):
    model = AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.float32)
    named = change(list(adapter_tensors(adapted)))
    with pytest.raises(WeightSyncError, match=words):
        StagedWeights(model).stage(write(tmp_path / "a", named, adapter_scale=SCALE))


def test_above_whole_weights_that_were_published_it_is_refused(model_folder, adapted, tmp_path):
    engine = new_engine(model_folder)
    update(engine, write(tmp_path / "w", merged_tensors(adapted)))
    with pytest.raises(WeightSyncError, match="version 1 replaced these"):
        engine.stage_weights(adapter_alone(tmp_path / "a", adapted, 2))
