"""Aggregation and policy losses: values and gradients of single tokens, by hand."""

import math

import pytest
import torch

from rlcore.algorithms import (
    agg_loss,
    batch_totals,
    cispo_loss,
    decoupled_ppo_loss,
    gmpo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
)

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 9 / 3),
        ("token-sum", 9.0),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum", (3 + 6) / 2),
        ("seq-mean-token-sum-norm", (3 + 6) / 2 / 3),
    ],
)
def test_aggregation_by_hand(mode, value):
    assert agg_loss(X, MASK, mode).item() == pytest.approx(value)
    assert agg_loss(X, MASK, mode, dp_size=2).item() == pytest.approx(2 * value)
    x = torch.tensor([[NAN, 1.0]], requires_grad=True)
    nothing = agg_loss(x, torch.zeros(1, 2), mode)
    nothing.backward()
    assert nothing.item() == 0 and x.grad.tolist() == [[0, 0]]
    assert agg_loss(torch.zeros(0, 0), torch.zeros(0, 0), mode).item() == 0


def test_aggregation_with_totals():
    assert agg_loss(X, MASK, batch_num_tokens=6).item() == 1.5
    assert agg_loss(X, MASK, "seq-mean-token-mean", global_batch_size=5).item() == 1.5
    assert agg_loss(X, MASK, "seq-mean-token-sum", global_batch_size=3).item() == 3
    norm = "seq-mean-token-sum-norm"
    assert agg_loss(X, MASK, norm, loss_scale_factor=10).item() == pytest.approx(0.45)
    # a total of 0: 0, whatever the values
    assert agg_loss(X, MASK, batch_num_tokens=0).item() == 0
    assert agg_loss(X, MASK, "seq-mean-token-sum", global_batch_size=0).item() == 0
    assert batch_totals(MASK) == {"batch_num_tokens": 3, "global_batch_size": 2}
    with pytest.raises((ValueError, TypeError), match=r"unknown loss_agg_mode|[Tt]ype-check"):
        agg_loss(X, MASK, "mean")


def test_aggregation_of_verls_example():
    x, mask = torch.tensor([[1.0] * 4, [3.0] * 4]), torch.tensor([[1] * 4, [1, 1, 0, 0]])
    found = [agg_loss(x, mask, mode).item() for mode in ("token-mean", "token-sum")]
    assert found == pytest.approx([10 / 6, 10])
    assert agg_loss(x, mask, "seq-mean-token-sum").item() == 5
    assert agg_loss(x, mask, "seq-mean-token-mean").item() == 2
    assert agg_loss(x, mask, "seq-mean-token-sum-norm").item() == 1.25


def single(loss, ratio: float, adv: float, old: float = -1.0, **kw) -> tuple[float, float]:
    """Loss and gradient of one token."""
    logp = torch.tensor([[old + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[adv]], dtype=torch.float64)
    value = loss(torch.full_like(logp, old).detach(), logp, advantage, torch.ones(1, 1), **kw)
    value.backward()
    return value.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("ratio", "adv", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, -1.0, -1.0),  # below: the smaller objective stays
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
        (5.0, 2.0, -2.56, 0.0),  # which changes nothing here
    ],
)
def test_ppo_by_hand(ratio, adv, loss, gradient):
    found = single(ppo_loss, ratio, adv, clip_low=0.2, clip_high=0.28, dual_clip=3)
    assert found == pytest.approx((loss, gradient))


def test_ppo_defaults():
    assert single(ppo_loss, 1.5, 1.0) == pytest.approx((-1.2, 0))
    assert single(ppo_loss, 0.5, -1.0) == pytest.approx((0.8, 0))
    # no dual clip
    assert single(ppo_loss, 5.0, -2.0) == pytest.approx((10, 10))


def test_far_ratios_are_finite_and_without_gradient():
    for loss in (ppo_loss, sapo_loss):
        logp = torch.tensor([[50.0, -50.0]], requires_grad=True)
        value = loss(torch.zeros(1, 2), logp, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2))
        value.backward()
        assert math.isfinite(value.item()) and logp.grad.tolist() == [[0, 0]]
    # the limit is 20: exp(20) and exp(-20)
    logp = torch.tensor([[50.0, -50.0]])
    adv, mask = torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2)
    value = ppo_loss(torch.zeros(1, 2), logp, adv, mask, agg="token-sum")
    assert value.item() == pytest.approx(math.exp(20) - math.exp(-20))
    inside = ppo_loss(torch.zeros(1, 2), torch.full((1, 2), 19.0), adv, mask, agg="token-sum")
    assert inside.item() == pytest.approx(math.exp(19) - 1.2)


@pytest.mark.parametrize("limit", [1.0, 0.9])
def test_dual_clip_must_be_above_one(limit):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"dual_clip must be above 1, is {limit}"):
        ppo_loss(one, one, one, one, dual_clip=limit)


def test_weights_multiply_after_clipping_and_masked_ones_are_not_read():
    mask = torch.tensor([[1, 0, 1]])
    adv = torch.tensor([[1.0, float("inf"), 2.0]])
    weights = torch.tensor([[3.0, NAN, 0.5]])
    old = torch.tensor([[0.0, NAN, 0.0]])

    def run(loss, **kw):
        logp = torch.tensor([[0.0, NAN, 0.0]], requires_grad=True)
        value = loss(logp, **kw)
        value.backward()
        return value.item(), logp.grad.tolist()

    # (3 * 1 + 0.5 * 2) / 2
    for loss in (ppo_loss, gspo_loss):
        found = run(lambda logp, f=loss: f(old, logp, adv, mask, is_weights=weights))
        assert found == (-2, [[-1.5, 0, -0.5]])
    # SAPO's gate is 2 at r = 1 with tau 1: 4 * sigmoid(0)
    found = run(lambda logp: sapo_loss(old, logp, adv, mask, is_weights=weights))
    assert found == (-4, [[-1.5, 0, -0.5]])
    for loss in (
        lambda logp: cispo_loss(old, logp, adv, mask, is_weights=weights),
        lambda logp: reinforce_loss(logp, adv, mask, is_weights=weights),
    ):
        assert run(loss) == (0, [[-1.5, 0, -0.5]])
    # the row's mean advantage is (3 + 1) / 2, its ratio 1
    found = run(lambda logp: gmpo_loss(old, logp, adv, mask, is_weights=weights))
    assert found == (-2, [[-1, 0, -1]])


def test_gspo_by_hand():
    # row 0: log ratios 0.2, 0.4: s = e^0.3; row 1: -0.1
    old = torch.zeros(2, 2, dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    adv = torch.tensor([[1.0, 1.0], [-2.0, NAN]]).double()

    def run(**kw):
        logp = torch.tensor([[0.2, 0.4], [-0.1, NAN]], dtype=torch.float64, requires_grad=True)
        value = gspo_loss(old, logp, adv, mask, **kw)
        value.backward()
        return value.item(), logp.grad.flatten().tolist()

    s, t = math.exp(0.3), math.exp(-0.1)
    value, gradient = run(clip_low=0.5, clip_high=0.5)
    # means over tokens, then over two rows
    assert value == pytest.approx((-s + 2 * t) / 2)
    assert gradient == pytest.approx([-s / 4, -s / 4, t, 0])
    # defaults clip both: 1 + 4e-4 above, 1 - 3e-4 below
    value, gradient = run()
    assert value == pytest.approx((-1.0004 + 2 * 0.9997) / 2)
    assert gradient == [0, 0, 0, 0]
    value, _ = run(clip_low=0.5, clip_high=0.5, agg="token-mean")
    assert value == pytest.approx((-2 * s + 2 * t) / 3)
    value, _ = run(clip_low=0.5, clip_high=0.5, agg_kw={"global_batch_size": 4})
    assert value == pytest.approx((-s + 2 * t) / 4)


def test_gspo_bounds_the_log_ratio_at_ten_above_only():
    assert single(gspo_loss, math.exp(15), -1.0) == pytest.approx((math.exp(10), 0))
    assert single(gspo_loss, math.exp(9.9), -1.0)[1] == pytest.approx(math.exp(9.9))
    assert single(gspo_loss, math.exp(-30), 1.0)[0] == pytest.approx(-math.exp(-30))


def test_cispo_by_hand():
    # -clamp(r) A logp, with logp = -1 + ln r
    for ratio, kw, factor in (
        (1.5, {}, 1.5),
        (9.0, {}, 5.0),
        (0.1, {}, 0.1),
        (0.1, {"ratio_min": 0.8}, 0.8),
        (1.5, {"ratio_max": 1.2}, 1.2),
    ):
        logp = -1 + math.log(ratio)
        found = single(cispo_loss, ratio, 2.0, **kw)
        # clipped tokens keep their gradient
        assert found == pytest.approx((-factor * 2 * logp, -factor * 2))
    mask, old = torch.ones(1, 2), torch.zeros(1, 2)
    adv = torch.tensor([[1.0, 3.0]])
    logp = torch.tensor([[-1.0, 0.0]])
    total = cispo_loss(old, logp, adv, mask, agg="token-sum").item()
    assert total == pytest.approx(math.exp(-1))
    divided = cispo_loss(old, logp, adv, mask, agg_kw={"batch_num_tokens": 4}).item()
    assert divided == pytest.approx(math.exp(-1) / 4)


def test_sapo_by_hand():
    def gate(tau, ratio):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    def slope(tau, ratio):
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * p * (1 - p) * ratio

    for ratio, adv, kw, tau in (
        (1.5, 2.0, {}, 1.0),
        (1.5, -2.0, {}, 1.05),
        (0.5, 1.0, {"tau_pos": 3.0}, 3.0),
        (2.0, -1.0, {"tau_neg": 0.5}, 0.5),
    ):
        found = single(sapo_loss, ratio, adv, **kw)
        assert found == pytest.approx((-adv * gate(tau, ratio), -adv * slope(tau, ratio)))
    # the default aggregation: rows weigh the same; at r = 1 the gate is 2 and 4 / 2.1
    mask = torch.tensor([[1, 1], [1, 0]])
    adv, zero = torch.tensor([[1.0, 1.0], [-3.0, 0.0]]), torch.zeros(2, 2)
    value = sapo_loss(zero, zero, adv, mask).item()
    assert value == pytest.approx((-2 + 3 * 2 / 1.05) / 2)
    assert sapo_loss(zero, zero, adv, mask, agg="token-mean").item() == pytest.approx(
        (-4 + 6 / 1.05) / 3
    )


def test_reinforce_by_hand():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    adv = torch.tensor([[3.0, -0.5]])
    loss = reinforce_loss(logp, adv, torch.ones(1, 2))
    loss.backward()
    # (3 * 1 - 0.5 * 2) / 2
    assert loss.item() == 1
    assert logp.grad.tolist() == [[-1.5, 0.25]]
    assert reinforce_loss(logp, adv, torch.ones(1, 2), "token-sum").item() == 2
    assert reinforce_loss(logp, adv, torch.ones(1, 2), agg_kw={"dp_size": 3}).item() == 3


def test_gmpo_by_hand():
    old = torch.zeros(3, 2, dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    adv = torch.tensor([[2.0, 2.0], [-1.0, -1.0], [NAN, NAN]]).double()

    def run(**kw):
        logp = torch.tensor([[0.9, 0.1], [-0.9, 0.7], [NAN, NAN]], dtype=torch.float64)
        logp.requires_grad_()
        value = gmpo_loss(old, logp, adv, mask, **kw)
        value.backward()
        return value.item(), logp.grad.flatten().tolist()

    # A > 0: min(0.9, 0.4) and 0.1; A < 0: max(-0.9, -0.4) and 0.7, which stays unbounded
    up, down = math.exp(0.25), math.exp(0.15)
    value, gradient = run()
    assert value == pytest.approx((-2 * up + down) / 2)
    assert gradient == pytest.approx([0, -up / 2, 0, down / 4, 0, 0])
    # below for A > 0 and above for A < 0 nothing is bounded
    up, down = math.exp((0.6 + 0.1) / 2), math.exp((-0.5 + 0.7) / 2)
    value, _ = run(clip_low=0.5, clip_high=0.6)
    assert value == pytest.approx((-2 * up + down) / 2)
    value, _ = run(clip_low=0.5, clip_high=0.6, agg_kw={"global_batch_size": 8, "dp_size": 2})
    assert value == pytest.approx((-2 * up + down) / 4)
    # totals of other modes have no effect
    value, _ = run(agg_kw={"batch_num_tokens": 99, "loss_scale_factor": 7.0})
    assert value == pytest.approx((-2 * math.exp(0.25) + math.exp(0.15)) / 2)


def test_gmpo_leaves_what_moves_back():
    # A > 0 and d = -3: not bounded at -0.4
    assert single(gmpo_loss, math.exp(-3), 1.0) == pytest.approx((-math.exp(-3), -math.exp(-3)))
    assert single(gmpo_loss, math.exp(3), -1.0) == pytest.approx((math.exp(3), math.exp(3)))
    assert single(gmpo_loss, 2.0, 0.0) == (0, 0)


def test_decoupled_ppo_by_hand():
    def run(adv, behave, prox, logp, **kw):
        mask = torch.tensor([[1, 0]])
        tensors = [torch.tensor([[x, NAN]], dtype=torch.float64) for x in (behave, prox, logp, adv)]
        tensors[2].requires_grad_()
        value = decoupled_ppo_loss(*tensors, mask, **kw)
        value.backward()
        return value.item(), tensors[2].grad[0, 0].item()

    ln2 = math.log(2)
    # w = 2, r = 1.1
    assert run(1.0, -ln2, 0.0, math.log(1.1)) == pytest.approx((-2.2, -2.2))
    # clipped at 1.2 before the weight
    assert run(1.0, -ln2, 0.0, math.log(1.5)) == pytest.approx((-2.4, 0))
    assert run(1.0, -ln2, 0.0, math.log(1.5), clip_high=0.6) == pytest.approx((-3, -3))
    assert run(-1.0, -ln2, 0.0, math.log(0.5), clip_low=0.4) == pytest.approx((1.2, 0))
    assert run(-1.0, -ln2, 0.0, math.log(9), dual_clip=3) == pytest.approx((6, 0))
    assert run(1.0, -ln2, 0.0, 0.0, cap=1.5) == pytest.approx((-1.5, -1.5))
    assert run(1.0, -ln2, 0.0, 0.0, cap=3.0) == pytest.approx((-2, -2))
    assert run(1.0, 0.0, -ln2, -ln2, cap=1.5) == pytest.approx((-0.5, -0.5))
    assert run(1.0, -ln2, 0.0, 0.0, cap=1.5, cap_mode="mask") == (0, 0)
    assert run(1.0, -ln2, 0.0, 0.0, cap=3.0, cap_mode="mask") == pytest.approx((-2, -2))
    # a weight beyond exp stays finite
    assert run(0.0, -1e4, 0.0, 0.0) == (0, 0)
    assert run(1.0, -1e4, 0.0, 0.0)[0] == pytest.approx(-math.exp(20))
    kw = {"agg": "token-sum", "agg_kw": {"dp_size": 2}}
    assert run(1.0, -ln2, 0.0, 0.0, **kw) == pytest.approx((-4, -4))
    with pytest.raises((ValueError, TypeError), match=r"unknown cap_mode|[Tt]ype-check"):
        run(1.0, 0.0, 0.0, 0.0, cap_mode="other")


def test_a_capped_token_stays_in_the_divisor():
    behave = torch.tensor([[-5.0, 0.0]])
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    # the first weight is e^5 > 2: masked, the divisor is 2
    loss = decoupled_ppo_loss(behave, zero, zero, one, one, cap=2.0, cap_mode="mask")
    assert loss.item() == -0.5
