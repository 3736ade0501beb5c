"""On-policy distillation: values by hand, gradients, what is constant."""

import math

import pytest
import torch

from rlcore.algorithms import (
    distillation_advantages,
    distillation_loss,
    distillation_pg_loss,
    teacher_kl,
)

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
# logp - teacher: 0.5, -2 and 1
STUDENT = [[-0.5, -3.0, NAN], [-1.0, NAN, NAN]]
TEACHER = torch.tensor([[-1.0, -1.0, NAN], [-2.0, NAN, NAN]], dtype=torch.float64)
K3 = [math.exp(-0.5) - 0.5, math.exp(2) - 3, math.exp(-1)]


def student() -> torch.Tensor:
    return torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "values", "slopes"),
    [
        ("k2", [0.125, 2.0, 0.5], [0.5, -2.0, 1.0]),
        ("k3", K3, [1 - math.exp(-0.5), 1 - math.exp(2), 1 - math.exp(-1)]),
        ("abs", [0.5, 2.0, 1.0], [1.0, -1.0, 1.0]),
        ("k1+", [0.5, -2.0, 1.0], [0.5, -2.0, 1.0]),
    ],
)
def test_the_loss_is_the_mean_estimate(kind, values, slopes):
    logp = student()
    loss = distillation_loss(logp, TEACHER, MASK, kind)
    assert loss.item() == pytest.approx(sum(values) / 3)
    loss.backward()
    found = [logp.grad[0, 0], logp.grad[0, 1], logp.grad[1, 0]]
    assert [g.item() for g in found] == pytest.approx([slope / 3 for slope in slopes])
    assert not logp.grad[~MASK.bool()].any()


def test_the_loss_takes_modes_totals_and_a_bound():
    assert distillation_loss(student(), TEACHER, MASK).item() == pytest.approx(sum(K3) / 3)
    rows = distillation_loss(student(), TEACHER, MASK, "k2", agg="seq-mean-token-sum")
    assert rows.item() == pytest.approx((2.125 + 0.5) / 2)
    totals = distillation_loss(student(), TEACHER, MASK, "k2", agg_kw={"batch_num_tokens": 6})
    assert totals.item() == pytest.approx(2.625 / 6)
    logp = student()
    bounded = distillation_loss(logp, TEACHER, MASK, "k2", 1.0)
    assert bounded.item() == pytest.approx((0.125 + 1 + 0.5) / 3)
    bounded.backward()
    assert logp.grad[0, 1] == 0


def test_k1_teaches_nothing_as_a_loss():
    with pytest.raises(ValueError, match="whatever the teacher says"):
        distillation_loss(student(), TEACHER, MASK, "k1")


def test_advantages_are_what_the_teacher_likes_better():
    found = distillation_advantages(student(), TEACHER, MASK)
    assert found.tolist() == [[-0.5, 2.0, 0.0], [-1.0, 0.0, 0.0]]
    assert not found.requires_grad
    bounded = distillation_advantages(student(), TEACHER, MASK, value_clamp=0.75)
    assert bounded.tolist() == [[-0.5, 0.75, 0.0], [-0.75, 0.0, 0.0]]
    squares = distillation_advantages(student(), TEACHER, MASK, "k2")
    assert squares[0].tolist() == [-0.125, -2.0, 0.0]


def test_the_policy_gradient_is_ppos_with_one_reward_a_token():
    logp = student()
    loss = distillation_pg_loss(logp.detach(), logp, TEACHER, MASK)
    assert loss.item() == pytest.approx((0.5 - 2 + 1) / 3)  # ratio 1: -(-0.5 + 2 - 1) / 3
    loss.backward()
    assert logp.grad[0, :2].tolist() == pytest.approx([0.5 / 3, -2 / 3])
    assert logp.grad[1, 0].item() == pytest.approx(1 / 3)


def test_the_policy_gradient_is_clipped_and_weighted():
    old = student().detach()
    steps = torch.tensor([[0.0, math.log(1.5), 0.0], [math.log(4.0), 0.0, 0.0]]).double()
    logp = (old + steps).requires_grad_()
    # 1 x -0.5; the second is cut at 1.3 x 2; the third, 4 x -1, at the dual clip's 3
    loss = distillation_pg_loss(old, logp, TEACHER, MASK, clip_low=0.1, clip_high=0.3)
    assert loss.item() == pytest.approx((0.5 - 2.6 + 3) / 3)
    loss.backward()
    assert logp.grad[0, 1] == 0 and logp.grad[1, 0] == 0 and logp.grad[0, 0] > 0
    weights = torch.tensor([[2.0, 1.0, 1.0], [0.0, 1.0, 1.0]]).double()
    weighted = distillation_pg_loss(
        old, old, TEACHER, MASK, agg="token-sum", is_weights=weights, dual_clip=None
    )
    assert weighted.item() == pytest.approx(2 * 0.5 - 2)


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_both_ways_have_the_kls_gradient(seed):
    """Over all tokens, weighted by their probability: the exact gradient of KL(pi || teacher)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)[None]
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - teacher[0])).sum(), logits)
    share, mask = logits.softmax(-1).detach()[None], torch.ones(1, 7)
    reward = distillation_pg_loss(
        logp.detach()[None], logits.log_softmax(-1)[None], teacher, mask,
        agg="token-sum", is_weights=share,
    )  # fmt: skip
    (found,) = torch.autograd.grad(reward, logits)
    assert torch.allclose(found, exact, atol=1e-12)
    each = [
        torch.autograd.grad(
            distillation_loss(
                logits.log_softmax(-1)[None, i : i + 1], teacher[:, i : i + 1], mask[:, :1], "k3+"
            ),
            logits,
        )[0]
        for i in range(7)
    ]
    found = sum(weight * slope for weight, slope in zip(share[0], each, strict=True))
    assert torch.allclose(found, exact, atol=1e-12)


def test_a_teacher_that_is_the_student_teaches_nothing():
    logp = student()
    for loss in (
        distillation_loss(logp, logp.detach(), MASK, "k3"),
        distillation_pg_loss(logp.detach(), logp, logp.detach(), MASK),
    ):
        logp.grad = None
        loss.backward()
        assert loss.item() == 0 and not logp.grad.any()
    assert teacher_kl(logp, logp, MASK) == 0


def test_the_teachers_kl_is_a_mean_over_valid_tokens():
    assert teacher_kl(student(), TEACHER, MASK) == pytest.approx((0.5 - 2 + 1) / 3)
    assert teacher_kl(student(), TEACHER, 0 * MASK) == 0
