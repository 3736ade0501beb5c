"""A frozen teacher: its log-probs, the term of the loss by its definition, what it refuses."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rlcore.algorithms import agg_loss, kl_estimate, ppo_loss
from rlcore.errors import ConfigError, DataError, FencedError
from rlcore.training.distillation import DistillationSpec
from rlcore.training.plan import LoraSpec
from rlcore.training.policy import Policy
from rlcore.training.worker import TrainingWorker


def padded(rows, *names):
    return [pad_sequence(rows[name], batch_first=True) for name in names]


def present(spec, rows) -> tuple[Policy, torch.Tensor]:
    """A policy of the spec's weights, and its log-probs with their graph, [B, T]."""
    policy = Policy(spec.model_path, dtype="float32")
    logp, _ = policy.log_probs(policy.layout(rows["prompts"], rows["responses"]), spec.temperature)
    parts = logp.split([len(response) for response in rows["responses"]])
    return policy, pad_sequence(list(parts), batch_first=True)


def gradient_norm(policy: Policy, loss: torch.Tensor) -> float:
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()


@pytest.mark.parametrize("packing", ["shared_prefix", "padded"])
def test_the_teachers_log_probs_are_those_of_its_model(
    make_spec, make_key, make_rows, teacher_path, packing
):
    rows, _ = make_rows()
    distillation = DistillationSpec(teacher_path=teacher_path)
    spec = make_spec(distillation=distillation, packing=packing, temperature=0.7)
    worker = TrainingWorker(spec)
    found, metrics = worker.compute_teacher_log_prob(make_key(1), rows)
    model = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32)
    gap, count = 0.0, 0
    for row, (prompt, response) in enumerate(zip(rows["prompts"], rows["responses"], strict=True)):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logp = (logits / 0.7).log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert torch.allclose(found["teacher_logprobs"][row], logp, atol=2e-5)
        valid = rows["response_mask"][row].bool()
        gap += (rows["old_log_probs"][row] - logp)[valid].sum().item()
        count += int(valid.sum())
    assert metrics["actor/distillation/teacher_kl"] == pytest.approx(gap / count, rel=1e-5)
    del rows["old_log_probs"]
    assert worker.compute_teacher_log_prob(make_key(1), rows)[1] == {}


def test_the_teacher_stays_what_it_was(make_spec, make_key, make_rows, teacher_path):
    rows, groups = make_rows()
    distillation = DistillationSpec(teacher_path=teacher_path, has_task_loss=False)
    worker = TrainingWorker(make_spec(distillation=distillation, lora=LoraSpec(rank=2)))
    assert not any(p.requires_grad for p in worker.teacher.model.parameters())
    first, _ = worker.compute_teacher_log_prob(make_key(1), rows)
    worker.update_actor(make_key(1), rows | first, groups)
    # computed again while and after the policy moves: it depends on the tokens alone
    again, _ = worker.compute_teacher_log_prob(make_key(1, try_number=2), rows)
    for got, want in zip(again["teacher_logprobs"], first["teacher_logprobs"], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("has_task_loss", [True, False])
@pytest.mark.parametrize("kind", ["k2", "k3", "k1+", "abs"])
def test_the_estimate_is_part_of_the_loss(
    make_spec, make_key, make_rows, teacher_path, kind, has_task_loss
):
    rows, groups = make_rows()
    settings = {"kind": kind, "value_clamp": 2.0}
    distillation = DistillationSpec(
        teacher_path=teacher_path, has_task_loss=has_task_loss, coef=0.5, settings=settings
    )
    spec = make_spec(distillation=distillation)
    worker = TrainingWorker(spec)
    rows |= worker.compute_teacher_log_prob(make_key(1), rows)[0]
    old, adv, teacher, mask = padded(
        rows, "old_log_probs", "advantages", "teacher_logprobs", "response_mask"
    )
    policy, logp = present(spec, rows)
    estimate = kl_estimate(logp, teacher, mask, kind, 2.0)
    distilled = agg_loss(estimate, mask)
    rewarded = ppo_loss(old, logp, adv, mask)
    loss = 0.5 * distilled + (rewarded if has_task_loss else 0)
    norm = gradient_norm(policy, loss)
    metrics = worker.update_actor(make_key(1), rows, groups)
    assert metrics["actor/distillation/loss"] == pytest.approx(distilled.item(), rel=1e-4)
    mean = (estimate.abs().sum() / mask.sum()).item()
    assert metrics["actor/distillation/abs_loss"] == pytest.approx(mean, rel=1e-4)
    assert metrics["actor/pg_loss"] == pytest.approx(rewarded.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_reward_a_token_is_part_of_the_loss(make_spec, make_key, make_rows, teacher_path):
    rows, groups = make_rows()
    settings = {"kind": "k1", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": None}
    distillation = DistillationSpec(
        teacher_path=teacher_path, is_policy_gradient=True, coef=2.0, settings=settings
    )
    spec = make_spec(distillation=distillation)
    worker = TrainingWorker(spec)
    rows |= worker.compute_log_prob(make_key(1), rows)[0]
    rows["old_log_probs"] = [value + 0.2 for value in rows["old_log_probs"]]
    rows |= worker.compute_teacher_log_prob(make_key(1), rows)[0]
    # half of the groups teach nothing by their rewards, and all by the teacher
    for row in range(0, len(groups), 2):
        rows["advantages"][row].zero_()
    old, adv, teacher, mask = padded(
        rows, "old_log_probs", "advantages", "teacher_logprobs", "response_mask"
    )
    policy, logp = present(spec, rows)
    distilled = ppo_loss(old, logp, teacher - old, mask, 0.1, 0.4)
    norm = gradient_norm(policy, 2.0 * distilled + ppo_loss(old, logp, adv, mask))
    metrics = worker.update_actor(make_key(1), rows, groups)
    assert metrics["actor/trained_trajectories"] == len(groups)
    assert metrics["actor/distillation/loss"] == pytest.approx(distilled.item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("is_policy_gradient", [False, True])
def test_a_teacher_like_the_policy_moves_nothing(
    make_spec, make_key, make_rows, is_policy_gradient
):
    rows, groups = make_rows()
    spec = make_spec()
    distillation = DistillationSpec(
        teacher_path=spec.model_path,
        is_policy_gradient=is_policy_gradient,
        has_task_loss=False,
        settings={"kind": "k1"} if is_policy_gradient else {"kind": "k2"},
    )
    worker = TrainingWorker(make_spec(distillation=distillation))
    rows |= worker.compute_log_prob(make_key(1), rows)[0]
    found, told = worker.compute_teacher_log_prob(make_key(1), rows)
    metrics = worker.update_actor(make_key(1), rows | found, groups)
    assert told["actor/distillation/teacher_kl"] == 0
    assert metrics["actor/distillation/loss"] == pytest.approx(0, abs=1e-9)
    assert metrics["actor/grad_norm"] == pytest.approx(0, abs=1e-5)


def test_a_non_finite_teacher_names_its_rows(make_spec, make_key, make_rows, teacher_path):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec(distillation=DistillationSpec(teacher_path=teacher_path)))
    rows |= worker.compute_teacher_log_prob(make_key(1), rows)[0]
    rows["teacher_logprobs"][4][0] = float("nan")
    metrics = worker.update_actor(make_key(1), rows, groups)
    assert metrics["actor/nonfinite_steps"] == 1 and metrics["actor/optimizer_steps"] == 0


def test_what_the_teacher_cannot_read_is_refused(make_spec, make_key, make_rows, teacher_path):
    rows, _ = make_rows()
    with pytest.raises(ConfigError, match="no teacher"):
        TrainingWorker(make_spec()).compute_teacher_log_prob(make_key(1), rows)
    worker = TrainingWorker(make_spec(distillation=DistillationSpec(teacher_path=teacher_path)))
    worker.give_up(make_key(1))
    with pytest.raises(FencedError):
        worker.compute_teacher_log_prob(make_key(1), rows)
    rows["responses"][3][-1] = 100  # as in a policy whose vocabulary has more padding
    with pytest.raises(DataError, match=r"row 3: responses hold token 100.*vocabulary has 100"):
        worker.compute_teacher_log_prob(make_key(1, try_number=2), rows)
