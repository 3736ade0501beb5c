"""PPO's loss, aggregation, KL, off-policy metrics, logits: values by hand and properties."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossSettings,
    agg_loss,
    batch_totals,
    kl_estimate,
    offpolicy_metrics,
    ppo_loss,
    token_entropy,
    token_logp,
)
from rlcore.algorithms.aggregate import AggMode

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
def test_aggregation_by_hand(mode: AggMode, value: float):
    assert agg_loss(X, MASK, mode).item() == pytest.approx(value)
    assert agg_loss(X, MASK, mode, dp_size=2).item() == pytest.approx(2 * value)
    nothing = torch.zeros_like(MASK)
    assert agg_loss(X, nothing, mode).item() == 0


def test_aggregation_with_a_constant_divisor():
    loss = agg_loss(X, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10.0)
    assert loss.item() == pytest.approx(0.45)
    with pytest.raises((ValueError, TypeError), match=r"unknown loss_agg_mode|Type-check"):
        agg_loss(X, MASK, "mean")  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sampled_from(get_args(AggMode)),
)
def test_micro_batches_sum_to_the_whole(masks: list[list[bool]], cut: int, mode: AggMode):
    mask = torch.tensor(masks)
    x = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    totals = {**batch_totals(mask), "loss_scale_factor": 7.0}
    whole = agg_loss(x, mask, mode, **totals)
    parts = [agg_loss(x[s], mask[s], mode, **totals) for s in (slice(cut), slice(cut, None))]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


def single(ratio: float, adv: float, **kw: float) -> tuple[float, float]:
    """Loss and gradient of one token."""
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss = ppo_loss(torch.zeros(1, 1), logp, torch.tensor([[adv]]), torch.ones(1, 1), **kw)
    loss.backward()
    return loss.item(), logp.grad.item()


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
    ],
)
def test_ppo_by_hand(ratio: float, adv: float, loss: float, gradient: float):
    found = single(ratio, adv, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert found == pytest.approx((loss, gradient), rel=1e-5)


def test_ppo_far_ratios_are_finite_and_without_gradient():
    logp = torch.tensor([[50.0, -50.0]], requires_grad=True)
    adv = torch.tensor([[-1.0, 1.0]])
    loss = ppo_loss(torch.zeros(1, 2), logp, adv, torch.ones(1, 2), agg="token-sum")
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-5)
    assert logp.grad.tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="must be above 1"):
        ppo_loss(logp, logp, adv, torch.ones(1, 2), dual_clip=0.9)


def test_ppo_hides_masked_positions_and_weights_the_others():
    mask = torch.tensor([[1, 0, 1]])
    old = torch.tensor([[0.0, NAN, 0.0]])
    adv = torch.tensor([[1.0, float("inf"), 2.0]])
    logp = torch.tensor([[0.0, NAN, 0.0]], requires_grad=True)
    loss = ppo_loss(old, logp, adv, mask, is_weights=torch.tensor([[3.0, NAN, 0.5]]))
    loss.backward()
    assert loss.item() == -2  # (3 * 1 + 0.5 * 2) / 2
    assert logp.grad.tolist() == [[-1.5, 0, -0.5]]


def test_vanilla_reports_what_was_clipped():
    ratio = torch.tensor([[1.5, 0.5, 5.0, 1.0]])
    inputs = PolicyLossInputs(
        old_logp=torch.zeros(1, 4),
        logp=ratio.log(),
        adv=torch.tensor([[1.0, -1.0, -1.0, 1.0]]),
        mask=torch.ones(1, 4),
    )
    loss, metrics = POLICY_LOSSES.get("vanilla")(inputs, PolicyLossSettings())
    # -1.2 + 0.8 + 3 - 1
    assert loss.item() == pytest.approx(1.6 / 4)
    assert metrics["pg_clipfrac"] == 0.5
    assert metrics["pg_clipfrac_lower"] == 0.25
    assert metrics["ppo_kl"] == pytest.approx(-math.log(3.75) / 4)
    _, metrics = POLICY_LOSSES.get("vanilla")(inputs, PolicyLossSettings(dual_clip=None))
    assert metrics["pg_clipfrac_lower"] == 0


def test_kl_by_hand():
    d = torch.tensor([[0.5, -2.0, NAN]])
    zero, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    expected = {
        "k1": [0.5, -2.0],
        "abs": [0.5, 2.0],
        "k2": [0.125, 2.0],
        "k3": [math.exp(-0.5) - 0.5, math.exp(2) - 3],
    }
    for kind, values in expected.items():
        assert kl_estimate(d, zero, mask, kind)[0].tolist() == pytest.approx([*values, 0])
    for kind in ("k1+", "k3+"):
        logp = torch.tensor([[0.5, -2.0, NAN]], requires_grad=True)
        value = kl_estimate(logp, zero, mask, kind)
        value.sum().backward()
        assert value[0, :2].tolist() == pytest.approx(expected[kind[:2]])
        assert logp.grad.tolist() == [[0.5, -2.0, 0]]
    assert kl_estimate(d, zero, mask, "k3", value_clamp=1.0)[0, 1].item() == 1
    with pytest.raises((ValueError, TypeError), match=r"unknown KL estimator|Type-check"):
        kl_estimate(d, zero, mask, "k4")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8))
def test_kl_is_not_negative(values: list[float]):
    d = torch.tensor([values])
    for kind in ("k2", "k3"):
        assert (kl_estimate(d, torch.zeros_like(d), torch.ones_like(d), kind) >= -1e-6).all()


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
    empty = offpolicy_metrics(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0))
    assert set(empty.values()) == {0.0}


def test_logits_by_hand_and_far_out():
    logits = torch.log(torch.tensor([[1.0, 3.0]]))
    assert token_logp(logits, torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    # temperature 0.5 squares the odds
    assert token_logp(logits, torch.tensor([0]), 0.5).item() == pytest.approx(math.log(0.1))
    h = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert token_entropy(logits).item() == pytest.approx(h)
    far = torch.tensor([[1000.0, -1000.0, float("-inf")]])
    assert token_logp(far, torch.tensor([0])).item() == 0
    assert token_entropy(far.bfloat16()).item() == 0
    assert token_entropy(torch.zeros(4), 0.3).item() == pytest.approx(math.log(4))
