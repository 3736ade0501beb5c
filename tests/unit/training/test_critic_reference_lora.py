"""Value model, frozen reference, KL in the loss, adapters, gradient checkpointing."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rlcore.algorithms import agg_loss, kl_estimate, value_loss
from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.errors import CheckpointError, ConfigError, FencedError
from rlcore.trainer.advantage import value_metrics
from rlcore.training.batches import MicroBatchLimits
from rlcore.training.lora import merged_tensors
from rlcore.training.plan import CriticSpec, LoraSpec, OptimizerSpec, UpdatePlan
from rlcore.training.policy import Policy
from rlcore.training.schedule import LearningRate
from rlcore.training.worker import TrainingWorker

LIMITS = MicroBatchLimits(max_rows=None, max_tokens=1000)


@pytest.fixture
def make_critic(model_path):
    def make(limits=LIMITS, epochs=1, **changes) -> CriticSpec:
        rate = LearningRate(peak=1e-2)
        return CriticSpec(
            model_path=model_path,
            optimizer=OptimizerSpec(limits=limits),
            plan=UpdatePlan(learning_rate=rate, mini_batch_groups=3, epochs=epochs),
            forward_limits=limits,
            **changes,
        )

    return make


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def with_values(worker, key, rows):
    generator = torch.Generator().manual_seed(3)
    found, _ = worker.compute_values(key, rows)
    returns = [torch.randn(len(r), generator=generator) for r in rows["responses"]]
    return {**rows, **found, "returns": returns}


def value_tables(rows):
    return [
        pad_sequence(rows[name], batch_first=True)
        for name in ("values", "returns", "response_mask")
    ]


def test_values_start_at_zero_and_learn_the_returns(make_spec, make_key, make_rows, make_critic):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec(critic=make_critic(epochs=60)))
    rows = with_values(worker, make_key(1), rows)
    assert all(not value.any() for value in rows["values"])
    rows["returns"] = [torch.full_like(v, float(i % 2)) for i, v in enumerate(rows["returns"])]
    first = worker.update_critic(make_key(1), rows, groups)
    assert first["critic/optimizer_steps"] == 60 and first["critic/lr"] == 1e-2
    assert value_metrics(*value_tables(rows))["critic/vf_explained_var"] == pytest.approx(0)
    assert worker.update_critic(make_key(1, try_number=2), rows, groups) == first
    with pytest.raises(FencedError, match="critic's update of this step has begun"):
        worker.compute_values(make_key(1, try_number=2), rows)
    later, _ = worker.compute_values(make_key(2), rows)
    found = value_metrics(*value_tables({**rows, **later}))
    assert found["critic/vf_explained_var"] > 0.3


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_that_of_the_definition(
    make_spec, make_key, make_rows, make_critic, clip
):
    rows, groups = make_rows()
    critic = make_critic(loss_settings={"clip": clip})
    worker = TrainingWorker(make_spec(critic=critic))
    rows = with_values(worker, make_key(1), rows)
    rows["values"] = [value + 0.3 for value in rows["values"]]  # the old ones were others
    mask, returns, old = (
        pad_sequence(rows[n], batch_first=True) for n in ("response_mask", "returns", "values")
    )
    now = torch.zeros_like(old)
    expected = value_loss(now, returns, old, mask, clip=clip).item()
    metrics = worker.update_critic(make_key(1), rows, groups)
    assert metrics["critic/vf_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["critic/vpred_mean"] == 0
    if clip is None:
        assert metrics["critic/vf_clipfrac"] == 0
    else:  # bounded to 0.1, which is further from the return wherever that is below 0.05
        share = ((returns < 0.05) & mask.bool()).sum().item() / mask.sum().item()
        assert metrics["critic/vf_clipfrac"] == pytest.approx(share)


def test_critics_are_equal_packed_padded_and_cut(make_spec, make_key, make_rows, make_critic):
    found = []
    for changes, limits in (
        ({}, LIMITS),
        ({"packing": "padded"}, LIMITS),
        ({}, MicroBatchLimits(max_rows=2, max_tokens=1)),
        ({"gradient_checkpointing": True}, LIMITS),
    ):
        rows, groups = make_rows()
        worker = TrainingWorker(make_spec(critic=make_critic(limits, epochs=3), **changes))
        rows = with_values(worker, make_key(1), rows)
        metrics = worker.update_critic(make_key(1), rows, groups)
        found.append((metrics["critic/vf_loss"], metrics["critic/grad_norm"]))
    for pair in found[1:]:
        assert pair == pytest.approx(found[0], rel=1e-4)


def test_a_critic_resumes_with_the_policy(make_spec, make_key, make_rows, make_critic, tmp_path):
    rows, groups = make_rows()
    spec = make_spec(critic=make_critic())
    worker = TrainingWorker(spec)
    rows = with_values(worker, make_key(1), rows)
    worker.update_critic(make_key(1), rows, groups)
    worker.update_actor(make_key(1), rows, groups)
    worker.save_checkpoint(make_key(1), tmp_path / "actor")
    resumed = TrainingWorker(spec)
    resumed.load_checkpoint(make_key(1), tmp_path / "actor")
    for one in (worker, resumed):
        one.update_critic(make_key(2), rows, groups)
    assert worker.critic and resumed.critic
    assert torch.equal(weights(worker.critic.model.net), weights(resumed.critic.model.net))
    with pytest.raises(ConfigError, match="no critic"):
        TrainingWorker(make_spec()).compute_values(make_key(1), rows)
    (tmp_path / "actor/critic/counters.json").unlink()
    with pytest.raises(CheckpointError, match="critic: cannot be read"):
        resumed.load_checkpoint(make_key(2), tmp_path / "actor")


def test_the_reference_stays_what_the_policy_was(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec(has_reference=True))
    start, _ = worker.compute_log_prob(make_key(1), rows)
    for step in (1, 2):
        found = worker.compute_ref_log_prob(make_key(step), rows)["ref_log_prob"]
        for got, want in zip(found, start["old_log_probs"], strict=True):
            assert torch.equal(got, want)
        worker.update_actor(make_key(step), rows, groups)
    with pytest.raises(ConfigError, match="no reference"):
        TrainingWorker(make_spec()).compute_ref_log_prob(make_key(1), rows)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_the_kl_is_part_of_the_loss(make_spec, make_key, make_rows, kind):
    rows, groups = make_rows()
    generator = torch.Generator().manual_seed(1)
    rows["advantages"] = [torch.zeros_like(value) for value in rows["advantages"]]
    rows["ref_log_prob"] = [
        -4 + torch.randn(len(r), generator=generator) for r in rows["responses"]
    ]
    spec = make_spec(kl_loss={"kind": kind}, kl_loss_coef=0.5, has_reference=True)
    worker = TrainingWorker(spec)
    policy = Policy(spec.model_path, dtype="float32")
    logp, _ = policy.log_probs(policy.layout(rows["prompts"], rows["responses"]), 1.0)
    lengths = [len(response) for response in rows["responses"]]
    logp = pad_sequence(list(logp.split(lengths)), batch_first=True)
    reference, mask = (
        pad_sequence(rows[name], batch_first=True) for name in ("ref_log_prob", "response_mask")
    )
    expected = agg_loss(kl_estimate(logp, reference, mask, kind), mask)
    (0.5 * expected).backward()
    norm = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()
    metrics = worker.update_actor(make_key(1), rows, groups)
    assert metrics["actor/kl_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_adapters_are_trained_alone_published_merged_and_saved(
    make_spec, make_key, make_rows, tmp_path
):
    rows, groups = make_rows()
    spec = make_spec(lora=LoraSpec(rank=4, alpha=8), has_reference=True)
    worker = TrainingWorker(spec)
    base = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float32)
    start, _ = worker.compute_log_prob(make_key(1), rows)
    first = worker.publish_weights(make_key(0), tmp_path, "float32")
    assert first is not None
    published = dict(read_tensors(first))
    assert published.keys() == base.state_dict().keys()
    assert all(torch.equal(published[n], t) for n, t in base.state_dict().items())
    for step in (1, 2):
        worker.update_actor(make_key(step), rows, groups)
    frozen = {n: p for n, p in worker.policy.model.named_parameters() if ".lora_" not in n}
    for name, tensor in frozen.items():
        assert torch.equal(tensor, base.state_dict()[name.replace(".base_layer", "")])
    moved, _ = worker.compute_log_prob(make_key(3), rows)
    reference = worker.compute_ref_log_prob(make_key(3), rows)["ref_log_prob"]
    for old, new, ref in zip(
        start["old_log_probs"], moved["old_log_probs"], reference, strict=True
    ):
        assert torch.equal(ref, old) and not torch.equal(new, old)
    worker.export_hf(make_key(3), tmp_path / "merged")
    merged = Policy(str(tmp_path / "merged"), dtype="float32")
    logp = merged.log_probs(merged.layout(rows["prompts"], rows["responses"]), 1.0)[0]
    assert torch.allclose(logp, torch.cat(moved["old_log_probs"]), atol=1e-5)
    worker.save_checkpoint(make_key(3), tmp_path / "actor")
    size = sum(f.stat().st_size for f in (tmp_path / "actor").rglob("*") if f.is_file())
    assert size < 4 * sum(p.numel() for p in frozen.values())
    resumed = TrainingWorker(spec)
    resumed.load_checkpoint(make_key(3), tmp_path / "actor")
    for one in (worker, resumed):
        one.update_actor(make_key(4), rows, groups)
    assert torch.equal(weights(worker.policy.model), weights(resumed.policy.model))


def test_adapters_are_published_alone_in_their_own_type(make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    lora = LoraSpec(rank=4, alpha=6, merge=False)
    worker = TrainingWorker(make_spec(lora=lora))
    worker.update_actor(make_key(1), rows, groups)
    alone = worker.publish_weights(make_key(1), tmp_path, "bfloat16")
    assert alone is not None and alone.adapter_scale == 1.5
    again = worker.publish_weights(make_key(1), tmp_path, "bfloat16")
    assert again == alone, "the same state is the same publication"
    found = {name: tensor.clone() for name, tensor in read_tensors(alone)}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    trained = {n: p for n, p in worker.policy.model.named_parameters() if p.requires_grad}
    assert {n.replace(".default", "") for n in trained} == set(found)
    merged = dict(merged_tensors(worker.policy.model))
    base = AutoModelForCausalLM.from_pretrained(worker.spec.model_path, dtype=torch.float32)
    changed = 0
    for name, tensor in base.state_dict().items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in found:
            down, up = (found[f"{layer}.lora_{side}.weight"] for side in "AB")
            tensor, changed = tensor + alone.adapter_scale * (up @ down), changed + 1
        assert torch.equal(merged[name], tensor), name
    assert changed == len(found) / 2 > 0


def test_adapters_on_nothing_are_refused(make_spec):
    with pytest.raises(ConfigError, match=r"target_modules=\['nothing'\].*no adapter"):
        TrainingWorker(make_spec(lora=LoraSpec(rank=2, target_modules=("nothing",))))


def test_chosen_modules_get_adapters(make_spec):
    worker = TrainingWorker(make_spec(lora=LoraSpec(rank=2, target_modules=("q_proj",))))
    trained = [n for n, p in worker.policy.model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all(".q_proj.lora_" in name for name in trained)


def test_gradient_checkpointing_changes_nothing(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    found = []
    for is_on in (False, True):
        worker = TrainingWorker(make_spec(gradient_checkpointing=is_on))
        found.append(worker.update_actor(make_key(1), rows, groups))
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)
