"""KL estimators, the critic's loss, off-policy metrics, logits: values by hand."""

import math

import pytest
import torch

from rlcore.algorithms import (
    kl_estimate,
    kl_importance_weighted,
    offpolicy_metrics,
    token_entropy,
    token_logp,
    value_loss,
)

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0]])
EXPECTED = {
    # d = 0.5, -2
    "k1": ([0.5, -2.0], [1, 1]),
    "abs": ([0.5, 2.0], [1, -1]),
    "k2": ([0.125, 2.0], [0.5, -2]),
    "k3": ([math.exp(-0.5) - 0.5, math.exp(2) - 3], [1 - math.exp(-0.5), 1 - math.exp(2)]),
    # the gradient of k2
    "k1+": ([0.5, -2.0], [0.5, -2]),
    "k3+": ([math.exp(-0.5) - 0.5, math.exp(2) - 3], [0.5, -2]),
}


def estimate(kind, **kw):
    logp = torch.tensor([[-0.5, -3.0, NAN]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -1.0, NAN]], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(logp, ref, MASK, kind, **kw)
    value.sum().backward()
    assert ref.grad is None
    return value[0].tolist(), logp.grad[0].tolist()


@pytest.mark.parametrize("kind", EXPECTED)
def test_kl_by_hand(kind):
    values, gradient = EXPECTED[kind]
    found = estimate(kind)
    assert found[0] == pytest.approx([*values, 0])
    assert found[1] == pytest.approx([*gradient, 0])


def test_kl_default_and_unknown_kinds():
    one = torch.ones(1, 1)
    assert kl_estimate(one, 0 * one, one).item() == pytest.approx(math.exp(-1))
    with pytest.raises((ValueError, TypeError), match=r"unknown KL estimator|[Tt]ype-check"):
        kl_estimate(one, one, one, "k4")


def test_kl_is_bounded():
    # e^2 - 3 = 4.39 is capped, without gradient
    values, gradient = estimate("k3", value_clamp=1.0)
    assert values == pytest.approx([math.exp(-0.5) - 0.5, 1, 0])
    assert gradient == pytest.approx([1 - math.exp(-0.5), 0, 0])
    assert estimate("k1", value_clamp=1.0)[0] == [0.5, -1, 0]
    # the gradient of a straight-through kind is not that of its value
    assert estimate("k3+", value_clamp=1.0)[1] == [0.5, -2, 0]
    for d, value in ((-50.0, math.exp(20) - 21), (50.0, math.exp(-20) + 19)):
        logp = torch.tensor([[d]], dtype=torch.float64, requires_grad=True)
        kl = kl_estimate(logp, torch.zeros(1, 1), torch.ones(1, 1))
        kl.sum().backward()
        assert kl.item() == pytest.approx(value) and logp.grad.item() == 0
    # small differences survive float32
    tiny = kl_estimate(torch.tensor([[1e-3]]), torch.zeros(1, 1), torch.ones(1, 1))
    assert tiny.item() == pytest.approx(5e-7, rel=1e-2)


def test_importance_weighted_kl_by_hand():
    logp = torch.tensor([[math.log(0.5), -1.0, NAN]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(0.25), -1.0, NAN]], dtype=torch.float64)
    ref = torch.tensor([[math.log(1.0), -3.0, NAN]], dtype=torch.float64)
    kl = kl_importance_weighted(logp, old, ref, MASK)
    kl.sum().backward()
    # d = ln 0.5: k3 = 2 - ln 2 - 1, times 2; d = 2, ratio 1
    first = 1 - math.log(2)
    assert kl[0].tolist() == pytest.approx([2 * first, math.exp(-2) + 1, 0])
    # ratio' k3 + ratio k3' = 2 first + 2 (1 - 2); on-policy: d
    assert logp.grad[0].tolist() == pytest.approx([2 * first - 2, 2, 0])
    k1 = kl_importance_weighted(logp, old, ref, MASK, "k1")
    assert k1[0].tolist() == pytest.approx([-2 * math.log(2), 2, 0])


def run_value(v, target, old, **kw):
    vpred = torch.tensor([[v, NAN]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[target, NAN]], dtype=torch.float64, requires_grad=True)
    old_values = torch.tensor([[old, NAN]], dtype=torch.float64, requires_grad=True)
    loss = value_loss(vpred, returns, old_values, torch.tensor([[1, 0]]), **kw)
    loss.backward()
    assert returns.grad is None and old_values.grad is None
    return loss.item(), vpred.grad.flatten().tolist()


def test_value_loss_by_hand():
    # v = 2, R = 0: 0.5 * max(4, 0.25)
    assert run_value(2.0, 0.0, 0.0) == (2, [2, 0])
    # moving towards R by more than 0.5 earns nothing: (0.5 - 3)^2 wins over (2 - 3)^2
    assert run_value(2.0, 3.0, 0.0) == (3.125, [0, 0])
    assert run_value(-2.0, -3.0, 0.0) == (3.125, [0, 0])
    # a wider clip, none, and within the clip
    assert run_value(2.0, 3.0, 0.0, clip=1) == (2, [0, 0])
    assert run_value(2.0, 3.0, 0.0, clip=None) == (0.5, [-1, 0])
    assert run_value(0.25, 1.25, 0.0) == (0.5, [-1, 0])
    assert run_value(2.0, 0.0, 0.0, agg="token-sum", agg_kw={"dp_size": 3}) == (6, [6, 0])


def test_offpolicy_metrics_by_hand():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    train = torch.log(torch.tensor([[0.5, 0.5], [0.25, NAN], [NAN, NAN]]))
    rollout = torch.log(torch.tensor([[0.25, 0.5], [0.25, NAN], [NAN, NAN]]))
    metrics = offpolicy_metrics(train, rollout, mask)
    ln2 = math.log(2)
    assert metrics["kl"] == pytest.approx(-ln2 / 3)
    assert metrics["k3_kl"] == pytest.approx((1 - ln2) / 3)
    assert metrics["chi2_token"] == pytest.approx((4 + 1 + 1) / 3 - 1)
    assert metrics["chi2_seq"] == pytest.approx((4 + 1) / 2 - 1)
    assert metrics["training_ppl"] == pytest.approx((2 + 4) / 2)
    assert metrics["rollout_ppl"] == pytest.approx((math.sqrt(8) + 4) / 2)
    assert metrics["probs_diff_max"] == pytest.approx(0.25)
    assert metrics["probs_diff_mean"] == pytest.approx(0.25 / 3)
    assert metrics["probs_diff_std"] == pytest.approx(math.sqrt((2 * 1 + 4) / 9 * 0.0625 / 3))
    assert metrics["logp_diff_max"] == pytest.approx(ln2)
    assert metrics["logp_diff_mean"] == pytest.approx(ln2 / 3)
    below = offpolicy_metrics(rollout, train, mask)
    assert below["logp_diff_max"] == pytest.approx(ln2)
    empty = offpolicy_metrics(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0))
    assert set(empty.values()) == {0.0}


@pytest.mark.parametrize(("sign", "k3"), [(1, math.exp(20) - 21), (-1, math.exp(-20) + 19)])
def test_offpolicy_metrics_are_bounded(sign, k3):
    d = torch.tensor([[sign * 200.0, 0.0]])
    metrics = offpolicy_metrics(d, torch.zeros(1, 2), torch.tensor([[1, 0]]))
    assert metrics["kl"] == -200 * sign
    assert metrics["k3_kl"] == pytest.approx(k3)
    square = math.exp(40 * sign) - 1
    assert (metrics["chi2_token"], metrics["chi2_seq"]) == pytest.approx((square, square))


def test_logits_by_hand_and_far_out():
    logits = torch.log(torch.tensor([[1.0, 3.0]]))
    assert token_logp(logits, torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    # temperature 0.5 squares the odds
    assert token_logp(logits, torch.tensor([0]), 0.5).item() == pytest.approx(math.log(0.1))
    h = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert token_entropy(logits).item() == pytest.approx(h)
    h = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert token_entropy(logits, 0.5).item() == pytest.approx(h)
    far = torch.tensor([[1000.0, -1000.0, float("-inf")]])
    assert token_logp(far, torch.tensor([0])).item() == 0
    assert token_logp(far, torch.tensor([1])).item() == -2000
    assert token_entropy(far.bfloat16()).item() == 0
    assert token_entropy(torch.zeros(4), 0.3).item() == pytest.approx(math.log(4))
    cube = torch.log(torch.tensor([[[1.0, 3.0], [1.0, 1.0]], [[4.0, 1.0], [1.0, 9.0]]]))
    chosen = token_logp(cube, torch.tensor([[1, 0], [0, 1]]))
    assert chosen.exp().flatten().tolist() == pytest.approx([0.75, 0.5, 0.8, 0.9])
    assert token_entropy(cube)[0, 1].item() == pytest.approx(math.log(2))
    assert token_logp(far.half(), torch.tensor([0])).dtype == torch.float32
    assert token_entropy(far.double()).dtype == torch.float64


def test_entropy_has_a_gradient_where_a_logit_is_minus_infinity():
    logits = torch.tensor([0.0, 1.0, float("-inf")], dtype=torch.float64, requires_grad=True)
    token_entropy(logits).backward()
    p = 1 / (1 + math.e)
    # -p (ln p + H) for the first
    h = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert logits.grad[0].item() == pytest.approx(-p * (math.log(p) + h))
    assert logits.grad[2].item() == 0
