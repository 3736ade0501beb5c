"""Two ranks do what one does: loss, gradient, weights, checkpoints, publication, skipped steps."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.errors import CheckpointError, FencedError, NonFiniteLossError
from rlcore.testing.rank_processes import RankProcesses, RankWorker
from rlcore.training.batches import MicroBatchLimits
from rlcore.training.checkpoint import read_weights
from rlcore.training.distillation import DistillationSpec
from rlcore.training.plan import CriticSpec, LoraSpec, OptimizerSpec, UpdatePlan
from rlcore.training.ranks import Ranks
from rlcore.training.schedule import LearningRate

pytestmark = pytest.mark.training_runs
TIMES = {
    "perf/update_critic_seconds": 0.0,
    "perf/update_seconds": 0.0,
    "perf/log_prob_seconds": 0.0,
}


@pytest.fixture(scope="module")
def pair():
    with RankProcesses(2) as ranks:
        yield ranks


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    assert {**found, **TIMES} == pytest.approx({**wanted, **TIMES}, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_agg_mode": "token-mean"},
        {"loss_agg_mode": "token-sum"},
        {"loss_agg_mode": "seq-mean-token-sum", "packing": "padded"},
        {"loss_agg_mode": "seq-mean-token-mean", "micro_batch_rows": 1},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_coeff": 0.1},
        # a rank with less than the other, or with nothing at all
        {"mini_batch_groups": 1, "ppo_epochs": 2, "shuffle": True, "micro_batch_tokens": 12},
    ],
    ids=str,
)
def test_two_ranks_step_as_one(pair, make_spec, make_key, make_rows, changes):
    rows, groups = make_rows(num_groups=3)
    spec = make_spec(loss_scale_factor=9.0, **changes)
    one = RankWorker(spec, Ranks())
    pair.build(spec)
    _, columns, wanted = one.compute_log_prob(make_key(1), rows, groups)
    answers = pair.call("compute_log_prob", make_key(1), rows, groups)
    assert sorted(answers[0][0] + answers[1][0]) == list(range(len(groups)))
    for chosen, found, metrics in answers:
        assert_same(metrics, wanted)
        for name, values in found.items():
            for row, value in zip(chosen, values, strict=True):
                assert torch.allclose(value, columns[name][row], atol=1e-5)
    before = one.weights()
    wanted = one.update_actor(make_key(1), rows, groups)
    for metrics in pair.call("update_actor", make_key(1), rows, groups):
        assert_same(metrics, wanted)
    moved = one.weights()
    for found in pair.call("weights"):
        # AdamW's first steps are of the size of the learning rate whatever the gradient's
        assert (found - moved).norm() < 2e-3 * (moved - before).norm()
    held = pair.call("local_elements")
    assert sum(held) == len(moved) and max(held) < 0.6 * len(moved)


def test_the_critic_of_two_ranks_is_that_of_one(
    pair, make_spec, make_key, make_rows, model_path, tmp_path
):
    rows, groups = make_rows(num_groups=3)
    rate, limits = LearningRate(peak=1e-2), MicroBatchLimits(max_rows=2, max_tokens=1)
    critic = CriticSpec(
        model_path=model_path,
        optimizer=OptimizerSpec(limits=limits),
        plan=UpdatePlan(learning_rate=rate, mini_batch_groups=2),
        forward_limits=limits,
    )
    rows["values"] = [torch.zeros(len(response)) for response in rows["responses"]]
    rows["returns"] = [torch.full_like(v, i % 3) for i, v in enumerate(rows["values"])]
    spec = make_spec(critic=critic, lora=LoraSpec(rank=2), has_reference=True)
    one = RankWorker(spec, Ranks())
    pair.build(spec)
    wanted = one.update_critic(make_key(1), rows, groups)
    for metrics in pair.call("update_critic", make_key(1), rows, groups):
        assert_same(metrics, wanted)
    _, values = one.compute_values(make_key(2), rows, groups)
    for chosen, found in pair.call("compute_values", make_key(2), rows, groups):
        for row, value in zip(chosen, found, strict=True):
            assert torch.allclose(value, values[row], atol=1e-4)
    # adapters on two ranks: trained, merged, and the base below them
    wanted = one.update_actor(make_key(2), rows, groups)
    assert_same(pair.call("update_actor", make_key(2), rows, groups)[0], wanted)
    meta, _ = pair.call("publish_weights", make_key(2), tmp_path, "float32")
    published = {name: tensor.clone() for name, tensor in read_tensors(meta)}
    alone = one.publish_weights(make_key(2), tmp_path, "float32")
    for name, tensor in read_tensors(alone):
        assert torch.allclose(published[name], tensor, atol=1e-5), name
    pair.call("save_checkpoint", make_key(2), tmp_path / "actor")
    one.load_checkpoint(make_key(2), tmp_path / "actor")


@pytest.mark.parametrize(
    "changes",
    [
        {"is_policy_gradient": True, "settings": {"kind": "k1"}},
        {"has_task_loss": False, "settings": {"kind": "k3"}},
    ],
    ids=["policy gradient", "alone"],
)
def test_the_teacher_of_two_ranks_is_that_of_one(
    pair, make_spec, make_key, make_rows, teacher_path, changes
):
    rows, groups = make_rows(num_groups=3)
    distillation = DistillationSpec(teacher_path=teacher_path, coef=0.5, **changes)
    spec = make_spec(
        distillation=distillation, lora=LoraSpec(rank=2), mini_batch_groups=2, micro_batch_rows=2
    )
    one = RankWorker(spec, Ranks())
    pair.build(spec)
    _, columns, told = one.compute_teacher_log_prob(make_key(1), rows, groups)
    answers = pair.call("compute_teacher_log_prob", make_key(1), rows, groups)
    assert sorted(answers[0][0] + answers[1][0]) == list(range(len(groups)))
    for chosen, found, metrics in answers:
        assert_same(metrics, told)
        for row, value in zip(chosen, found["teacher_logprobs"], strict=True):
            assert torch.allclose(value, columns["teacher_logprobs"][row], atol=1e-5)
    wanted = one.update_actor(make_key(1), rows | columns, groups)
    assert wanted["actor/distillation/loss"] != 0
    for metrics in pair.call("update_actor", make_key(1), rows | columns, groups):
        assert_same(metrics, wanted)


def test_the_order_of_rows_does_not_matter(pair, make_spec, make_key, make_rows):
    rows, groups = make_rows(num_groups=4)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(1)).tolist()
    mixed = {name: [values[i] for i in order] for name, values in rows.items()}
    spec = make_spec(mini_batch_groups=4)
    pair.build(spec)
    wanted = pair.call("update_actor", make_key(1), rows, groups)[0]
    pair.build(spec)
    found = pair.call("update_actor", make_key(1), mixed, [groups[i] for i in order])[0]
    assert_same(found, wanted)


def test_a_nan_names_its_row_and_skips_the_step_on_all_ranks(
    pair, make_spec, make_key, make_rows, tmp_path
):
    rows, groups = make_rows(num_groups=4)
    pair.build(make_spec(mini_batch_groups=4, max_nonfinite_steps=2))
    before = pair.call("weights")[0]
    rows["advantages"][4][0] = float("nan")
    first, second = pair.call("update_actor", make_key(1), rows, groups)
    assert (first["actor/optimizer_steps"], first["actor/nonfinite_steps"]) == (0, 1)
    assert {**first, **TIMES} == {**second, **TIMES}
    assert all(torch.equal(found, before) for found in pair.call("weights"))
    (dump,) = (tmp_path / "run/nonfinite").glob("*.pt")
    content = torch.load(dump, weights_only=True)
    assert content["groups"] == ["prompt1"]
    assert content["responses"][0].tolist() == rows["responses"][4].tolist()
    with pytest.raises(NonFiniteLossError, match=r"1 trajectories of prompts prompt1.*number 2"):
        pair.call("update_actor", make_key(2), rows, groups)
    assert all(torch.equal(found, before) for found in pair.call("weights"))


def test_a_repeat_returns_the_stored_metrics(pair, make_spec, make_key, make_rows):
    rows, groups = make_rows()
    pair.build(make_spec())
    first = pair.call("update_actor", make_key(1), rows, groups)
    weights = pair.call("weights")
    assert pair.call("update_actor", make_key(1, try_number=2), rows, groups) == first
    assert torch.equal(pair.call("weights")[1], weights[1])
    with pytest.raises(FencedError, match="has begun"):
        pair.call("compute_log_prob", make_key(1, try_number=2), rows, groups)


def test_checkpoints_move_between_one_rank_and_two(pair, make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    spec = make_spec()
    pair.build(spec)
    pair.call("update_actor", make_key(1), rows, groups)
    pair.call("save_checkpoint", make_key(1), tmp_path / "by-two")
    weights = pair.call("weights")[0]
    one = RankWorker(make_spec(seed=5), Ranks())
    one.load_checkpoint(make_key(1), tmp_path / "by-two")
    assert torch.equal(one.weights(), weights)
    one.save_checkpoint(make_key(1), tmp_path / "by-one")
    wanted = one.update_actor(make_key(2), rows, groups)
    pair.build(make_spec(seed=6))
    pair.call("load_checkpoint", make_key(1), tmp_path / "by-one")
    assert torch.equal(pair.call("weights")[1], weights)
    assert_same(pair.call("update_actor", make_key(2), rows, groups)[0], wanted)
    assert torch.allclose(pair.call("weights")[0], one.weights(), atol=2e-6)
    model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float32)
    read_weights(tmp_path / "by-two", model)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), weights)
    index = tmp_path / "by-two/state/.metadata"
    for damage in (lambda: index.write_bytes(b""), lambda: index.write_bytes(b"?"), index.unlink):
        damage()
        with pytest.raises(CheckpointError, match="by-two: cannot be read"):
            read_weights(tmp_path / "by-two", model)
        with pytest.raises(CheckpointError, match="by-two: cannot be read"):
            pair.call("load_checkpoint", make_key(1), tmp_path / "by-two")


def test_old_log_probs_are_those_of_the_steps_start(pair, make_spec, make_key, make_rows):
    rows, groups = make_rows()
    pair.build(make_spec(learning_rate=LearningRate(peak=1e-2)))

    def old(inner_step: int) -> list[torch.Tensor]:
        key = make_key(1, inner_step=inner_step)
        answers = pair.call("compute_log_prob", key, rows, groups, True)
        return [value for _, columns, _ in answers for value in columns["old_log_probs"]]

    first = old(0)
    pair.call("update_actor", make_key(1), rows, groups)
    moved = pair.call("weights")[0]
    assert all(torch.equal(a, b) for a, b in zip(old(1), first, strict=True))
    assert torch.equal(pair.call("weights")[0], moved)
    now = pair.call("compute_log_prob", make_key(2), rows, groups)
    assert not torch.equal(now[0][1]["old_log_probs"][0], first[0])
    with pytest.raises(FencedError, match="has to begin anew"):
        pair.call("compute_log_prob", make_key(3, inner_step=1), rows, groups, True)


def test_weights_are_published_and_exported_whole(pair, make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    pair.build(make_spec())
    pair.call("update_actor", make_key(1), rows, groups)
    meta, nothing = pair.call("publish_weights", make_key(1), tmp_path, "bfloat16")
    assert nothing is None and meta.version == 0
    pair.call("export_hf", make_key(1), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(flat, pair.call("weights")[0])
    published = dict(read_tensors(meta))
    assert set(published) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(published[name], tensor.bfloat16())
