"""What holds for every function: masks, padding, order, precision, gradients (hypothesis).

One file, though a long one: every property is drawn from the one table of functions below.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import rlcore.algorithms as alg
from rlcore.algorithms.aggregate import AggMode

JUNK = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30]
MODES = list(AggMode.__args__)


@dataclass(frozen=True)
class Batch:
    """Everything that a function may want; tokens [B, T], rows [B]."""

    mask: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    adv: Tensor
    rewards: Tensor
    values: Tensor
    weights: Tensor
    scores: Tensor
    matrix: Tensor
    baselines: Tensor
    groups: list[int]
    sessions: list[int]
    index: list[int]


TOKENS = ("logp", "old", "ref", "adv", "rewards", "values", "weights")
ROWS = ("scores", "matrix", "baselines")
LABELS = ("groups", "sessions", "index")


@st.composite
def batches(draw, min_rows: int = 0, min_width: int = 0) -> Batch:
    rows = draw(st.integers(min_rows, 5))
    width = draw(st.integers(min_width, 5))
    bits = draw(st.integers(0, 2 ** (rows * width) - 1))
    mask = torch.tensor([bits >> i & 1 for i in range(rows * width)]).view(rows, width).long()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(rows, width).abs()
    return Batch(
        mask=mask,
        old=old,
        logp=old + normal(rows, width, scale=0.3),
        ref=old + normal(rows, width, scale=0.5),
        adv=normal(rows, width),
        rewards=normal(rows, width),
        values=normal(rows, width),
        weights=normal(rows, width).exp(),
        scores=torch.tensor(
            [draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])) for _ in range(rows)],
            dtype=torch.float64,
        ),
        matrix=normal(rows, 2).round(decimals=1),
        baselines=normal(rows),
        groups=[draw(st.integers(0, 2)) for _ in range(rows)],
        sessions=[draw(st.integers(0, 2)) for _ in range(rows)],
        index=list(range(rows)),
    )


def changed(batch: Batch, names: tuple[str, ...], change: Callable) -> Batch:
    return dataclasses.replace(batch, **{name: change(getattr(batch, name)) for name in names})


# Functions of a batch that return tokens [B, T], without gradient.
ARRAYS: dict[str, Callable[[Batch], Tensor]] = {
    "grpo": lambda b: alg.grpo(b.scores, b.groups, b.mask),
    "grpo batch": lambda b: alg.grpo(b.scores, b.groups, b.mask, std_level="batch"),
    "dr_grpo": lambda b: alg.dr_grpo(b.scores, b.groups, b.mask),
    "rloo": lambda b: alg.rloo(b.scores, b.groups, b.mask, singleton="raw"),
    "grpo_passk": lambda b: (
        alg.grpo_passk(b.scores, [0] * max(len(b.scores), 1), b.mask)
        if len(b.scores) > 1
        else torch.zeros_like(b.adv)
    ),
    "opo": lambda b: alg.opo(b.scores, b.groups, b.mask),
    "gpg": lambda b: alg.gpg(b.scores, b.groups, b.mask),
    "gdpo": lambda b: alg.gdpo(b.matrix, b.groups, b.mask),
    "gdpo token": lambda b: alg.gdpo(b.matrix, b.groups, b.mask, batch_norm="token"),
    "reinforce_pp_baseline": lambda b: alg.reinforce_pp_baseline(b.scores, b.groups, b.mask),
    "multi_trajectory": lambda b: alg.multi_trajectory(
        b.scores, b.groups, b.sessions, b.index, b.mask
    ),
    "session_weights": lambda b: alg.session_weights(b.groups, b.sessions, b.mask),
    "gae": lambda b: alg.gae(b.rewards, b.values, b.mask, 0.9, 0.8, True, b.baselines)[0],
    "gae returns": lambda b: alg.gae(b.rewards, b.values, b.mask, 0.9, 0.8)[1],
    "remax": lambda b: alg.remax(b.rewards, b.baselines, b.mask)[0],
    "reinforce_pp": lambda b: alg.reinforce_pp(b.rewards, b.mask, 0.9)[0],
    "reinforce_pp returns": lambda b: alg.reinforce_pp(b.rewards, b.mask, 0.9)[1],
    "masked_whiten": lambda b: alg.masked_whiten(b.rewards, b.mask),
    "place_outcome_reward": lambda b: alg.place_outcome_reward(b.scores, b.mask),
    "kl_in_reward": lambda b: alg.kl_in_reward(b.rewards, b.old, b.ref, b.mask, 0.1)[0],
    "weights token": lambda b: alg.rollout_is_weights(b.logp, b.old, b.mask, upper=1.2),
    "weights sequence": lambda b: alg.rollout_is_weights(
        b.logp, b.old, b.mask, "sequence", "mask", 2.0, 0.5, True
    ),
    "weights geometric": lambda b: alg.rollout_is_weights(
        b.logp, b.old, b.mask, "geometric", batch_normalize=True
    ),
    "rejection token": lambda b: alg.rejection_mask(
        b.logp, b.old, b.mask, lower=0.8, upper=1.2
    ).double(),
    "rejection seq": lambda b: alg.rejection_mask(
        b.logp, b.old, b.mask, "k3", "seq_mean", upper=0.05
    ).double(),
    "rejection max": lambda b: alg.rejection_mask(
        b.logp, b.old, b.mask, level="seq_max", lower=0.7
    ).double(),
    "off_policy_sequence_mask": lambda b: alg.off_policy_sequence_mask(
        b.old, b.logp, b.adv, b.mask, 0.05
    ).double(),
    **{
        f"kl {kind}": lambda b, kind=kind: alg.kl_estimate(b.logp, b.ref, b.mask, kind)
        for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+")
    },
}

# Losses: of the batch and of the arguments of agg_loss.
Loss = Callable[[Batch, dict], Tensor]
LOSSES: dict[str, Loss] = {
    "ppo": lambda b, kw: alg.ppo_loss(
        b.old, b.logp, b.adv, b.mask, dual_clip=1.5, is_weights=b.weights, **kw
    ),
    "gspo": lambda b, kw: alg.gspo_loss(
        b.old, b.logp, b.adv, b.mask, 0.1, 0.1, is_weights=b.weights, **kw
    ),
    "cispo": lambda b, kw: alg.cispo_loss(
        b.old, b.logp, b.adv, b.mask, 0.9, 1.1, is_weights=b.weights, **kw
    ),
    "sapo": lambda b, kw: alg.sapo_loss(
        b.old, b.logp, b.adv, b.mask, 2.0, is_weights=b.weights, **kw
    ),
    "reinforce": lambda b, kw: alg.reinforce_loss(
        b.logp, b.adv, b.mask, is_weights=b.weights, **kw
    ),
    "gmpo": lambda b, kw: alg.gmpo_loss(
        b.old, b.logp, b.adv, b.mask, is_weights=b.weights, agg_kw=kw.get("agg_kw")
    ),
    "decoupled": lambda b, kw: alg.decoupled_ppo_loss(
        b.ref, b.old, b.logp, b.adv, b.mask, cap=1.5, **kw
    ),
    "value": lambda b, kw: alg.value_loss(b.logp, b.rewards, b.values, b.mask, **kw),
    "kl": lambda b, kw: alg.agg_loss(
        alg.kl_estimate(b.logp, b.ref, b.mask), b.mask, kw.get("agg", "token-mean"),
        **kw.get("agg_kw", {}),
    ),
    "kl weighted": lambda b, kw: alg.agg_loss(
        alg.kl_importance_weighted(b.logp, b.old, b.ref, b.mask), b.mask,
        kw.get("agg", "token-mean"), **kw.get("agg_kw", {}),
    ),
}  # fmt: skip
# CISPO's ratio and GSPO's mean are constants that a difference would move.
DIFFERENTIABLE = sorted(set(LOSSES) - {"cispo", "gspo"})


def value_and_gradient(loss: Loss, batch: Batch, kw: dict) -> tuple[Tensor, Tensor]:
    logp = batch.logp.clone().requires_grad_()
    value = loss(dataclasses.replace(batch, logp=logp), kw)
    (gradient,) = torch.autograd.grad(value, logp)
    return value.detach(), gradient


def with_junk(batch: Batch) -> Batch:
    def spoil(x: Tensor) -> Tensor:
        junk = torch.tensor(JUNK, dtype=x.dtype).repeat(x.numel() // len(JUNK) + 1)
        return torch.where(batch.mask.bool(), x, junk[: x.numel()].view(x.shape))

    return changed(batch, TOKENS, spoil)


def padded(batch: Batch, columns: int) -> Batch:
    batch = changed(batch, TOKENS, lambda x: torch.nn.functional.pad(x, (0, columns), value=1e30))
    return changed(batch, ("mask",), lambda x: torch.nn.functional.pad(x, (0, columns)))


def reordered(batch: Batch, order: list[int]) -> Batch:
    batch = changed(batch, (*TOKENS, *ROWS, "mask"), lambda x: x[order])
    return changed(batch, LABELS, lambda labels: [labels[i] for i in order])


def close(a: Tensor, b: Tensor, **kw: float) -> bool:
    return torch.allclose(a, b, **{"rtol": 1e-9, "atol": 1e-12, **kw})


few = settings(deadline=None, max_examples=20)


@few
@given(batch=batches())
def test_arrays_ignore_masked_values_padding_and_order(batch: Batch):
    for name in ARRAYS:
        note(name)
        function = ARRAYS[name]
        expected = function(batch)
        assert expected.shape == batch.mask.shape
        assert expected.isfinite().all()
        assert (expected[batch.mask == 0] == 0).all()
        assert torch.equal(function(with_junk(batch)), expected)
        rows, width = batch.mask.shape
        wide = function(padded(batch, 3))
        assert close(wide[:, :width], expected) and (wide[:, width:] == 0).all()
        order = list(reversed(range(rows)))
        assert close(function(reordered(batch, order)), expected[order])


@few
@given(batch=batches(min_width=1))
def test_an_all_masked_column_may_go(batch: Batch):
    for name in ARRAYS:
        note(name)
        empty = changed(batch, ("mask",), lambda mask: mask.index_fill(1, torch.tensor([0]), 0))
        narrow = changed(empty, (*TOKENS, "mask"), lambda x: x[:, 1:])
        assert close(ARRAYS[name](empty)[:, 1:], ARRAYS[name](narrow))


@few
@given(batch=batches())
def test_arrays_in_float32(batch: Batch):
    for name in ARRAYS:
        note(name)
        narrow = changed(batch, (*TOKENS, *ROWS), lambda x: x.float())
        exact = changed(narrow, (*TOKENS, *ROWS), lambda x: x.double())
        found, expected = ARRAYS[name](narrow), ARRAYS[name](exact)
        assert close(found.double(), expected.double(), rtol=2e-4, atol=2e-6)


@few
@given(batch=batches())
def test_arrays_change_no_input_and_want_no_mask_type(batch: Batch):
    for name in ARRAYS:
        note(name)
        copy = changed(batch, (*TOKENS, *ROWS, "mask"), Tensor.clone)
        expected = ARRAYS[name](batch)
        for field in (*TOKENS, *ROWS, "mask"):
            assert torch.equal(getattr(batch, field), getattr(copy, field))
        for change in (Tensor.bool, Tensor.double):
            found = ARRAYS[name](changed(batch, ("mask",), change))
            assert torch.equal(found.double(), expected.double())


@few
@given(batch=batches(), mode=st.sampled_from(MODES))
def test_losses_ignore_masked_values_padding_and_order(batch: Batch, mode: str):
    for name in LOSSES:
        note(name)
        kw = {"agg": mode, "agg_kw": {"loss_scale_factor": 7.0}}
        value, gradient = value_and_gradient(LOSSES[name], batch, kw)
        assert value.isfinite() and gradient.isfinite().all()
        assert (gradient[batch.mask == 0] == 0).all()
        if not batch.mask.any():
            assert value.item() == 0
        again = value_and_gradient(LOSSES[name], with_junk(batch), kw)
        assert torch.equal(again[0], value) and torch.equal(again[1], gradient)
        rows, width = batch.mask.shape
        wide = value_and_gradient(LOSSES[name], padded(batch, 2), kw)
        assert close(wide[0], value) and close(wide[1][:, :width], gradient)
        order = list(reversed(range(rows)))
        turned = value_and_gradient(LOSSES[name], reordered(batch, order), kw)
        assert close(turned[0], value) and close(turned[1], gradient[order])


@few
@given(batch=batches(), mode=st.sampled_from(MODES), cut=st.integers(0, 5))
def test_micro_batches_sum_to_the_whole(batch: Batch, mode: str, cut: int):
    for name in LOSSES:
        note(name)
        totals = {**alg.batch_totals(batch.mask), "loss_scale_factor": 7.0, "dp_size": 2}
        kw = {"agg": mode, "agg_kw": totals}
        value, gradient = value_and_gradient(LOSSES[name], batch, kw)
        alone, _ = value_and_gradient(
            LOSSES[name], batch, {"agg": mode, "agg_kw": {"loss_scale_factor": 7.0, "dp_size": 2}}
        )
        assert close(alone, value)
        rows = list(range(len(batch.scores)))
        parts = [
            value_and_gradient(LOSSES[name], reordered(batch, part), kw)
            for part in (rows[:cut], rows[cut:])
        ]
        assert close(parts[0][0] + parts[1][0], value)
        assert close(torch.cat([part[1] for part in parts]), gradient)


@few
@given(batch=batches())
def test_losses_in_float32(batch: Batch):
    for name in LOSSES:
        note(name)
        narrow = changed(batch, TOKENS, lambda x: x.float())
        found = value_and_gradient(LOSSES[name], narrow, {})
        exact = value_and_gradient(LOSSES[name], changed(narrow, TOKENS, lambda x: x.double()), {})
        for ours, theirs in zip(found, exact, strict=True):
            assert ours.dtype == torch.float32 and theirs.dtype == torch.float64
            assert close(ours.double(), theirs, rtol=2e-4, atol=2e-6)
        half = value_and_gradient(LOSSES[name], changed(batch, TOKENS, lambda x: x.bfloat16()), {})
        assert half[0].dtype == torch.float32


@settings(deadline=None, max_examples=10)
@given(batch=batches(min_rows=1, min_width=1), mode=st.sampled_from(MODES))
def test_gradients_against_finite_differences(batch: Batch, mode: str):
    for name in DIFFERENTIABLE:
        note(name)
        kw, h = {"agg": mode}, 1e-6
        _, gradient = value_and_gradient(LOSSES[name], batch, kw)
        for i in range(batch.logp.numel()):
            sides = []
            for step in (-h, h):
                moved = batch.logp.clone()
                moved.view(-1)[i] += step
                sides.append(LOSSES[name](dataclasses.replace(batch, logp=moved), kw).item())
            slope = (sides[1] - sides[0]) / (2 * h)
            assert slope == pytest.approx(gradient.view(-1)[i].item(), rel=1e-4, abs=1e-6)


@few
@given(batch=batches(min_rows=1, min_width=1))
def test_gspo_gradient_against_finite_differences_of_the_sequence_form(batch: Batch):
    # one advantage and weight per row: token form and sequence form have the same gradient
    def flat(x: Tensor) -> Tensor:
        return x[:, :1].expand(x.shape)

    batch = changed(batch, ("adv", "weights"), flat)
    _, gradient = value_and_gradient(LOSSES["gspo"], batch, {})
    for i in range(batch.logp.numel()):
        sides = []
        for step in (-1e-6, 1e-6):
            moved = batch.logp.clone()
            moved.view(-1)[i] += step
            sides.append(LOSSES["gspo"](dataclasses.replace(batch, logp=moved), {}).item())
        slope = (sides[1] - sides[0]) / 2e-6
        assert slope == pytest.approx(gradient.view(-1)[i].item(), rel=1e-4, abs=1e-6)


@few
@given(batch=batches())
def test_on_policy_gradients_are_minus_the_weighted_advantage(batch: Batch):
    batch = dataclasses.replace(batch, logp=batch.old, ref=batch.old)
    expected = torch.where(batch.mask.bool(), -batch.adv * batch.weights, 0.0)
    kw = {"agg": "token-sum"}
    for name in ("ppo", "gspo", "sapo", "cispo", "reinforce"):
        _, gradient = value_and_gradient(LOSSES[name], batch, kw)
        assert close(gradient, expected)
    one = dataclasses.replace(batch, weights=torch.ones_like(batch.weights))
    _, gradient = value_and_gradient(LOSSES["decoupled"], one, kw)
    assert close(gradient, torch.where(batch.mask.bool(), -batch.adv, 0.0))


@few
@given(batch=batches())
def test_unbiased_kl_gradients_are_d(batch: Batch):
    # on-policy: k1+, k3+ and the weighted k3
    batch = dataclasses.replace(batch, old=batch.logp)
    d = torch.where(batch.mask.bool(), batch.logp - batch.ref, 0.0)
    functions = [
        lambda b: alg.kl_estimate(b.logp, b.ref, b.mask, "k1+"),
        lambda b: alg.kl_estimate(b.logp, b.ref, b.mask, "k3+"),
        lambda b: alg.kl_importance_weighted(b.logp, b.old, b.ref, b.mask),
    ]
    for function in functions:
        _, gradient = value_and_gradient(lambda b, _, f=function: f(b).sum(), batch, {})
        assert close(gradient, d)


@few
@given(batch=batches(), scale=st.floats(0.1, 50))
def test_kl_is_not_negative(batch: Batch, scale: float):
    for kind in ("k2", "k3", "abs"):
        assert (alg.kl_estimate(scale * batch.logp, batch.ref, batch.mask, kind) >= 0).all()


@few
@given(batch=batches(), shift=st.floats(-100, 100))
def test_group_advantages_sum_to_zero_and_ignore_a_shift(batch: Batch, shift: float):
    mask = torch.ones(len(batch.scores), 1)
    for function in (alg.grpo, alg.dr_grpo, alg.rloo, alg.gpg):
        adv = function(batch.scores, batch.groups, mask)[:, 0]
        for label in set(batch.groups):
            members = [i for i, group in enumerate(batch.groups) if group == label]
            assert abs(adv[members].sum().item()) < 1e-9
        moved = function(batch.scores + shift, batch.groups, mask)[:, 0]
        if function is not alg.gpg:
            assert close(moved, adv, rtol=1e-6, atol=1e-9)
    # opo: the length-weighted sum
    lengths = torch.arange(len(batch.scores)).double() + 1
    adv = alg.opo(batch.scores, batch.groups, mask, lengths)[:, 0]
    for label in set(batch.groups):
        members = [i for i, group in enumerate(batch.groups) if group == label]
        assert abs((adv * lengths)[members].sum().item()) < 1e-9


@few
@given(batch=batches())
def test_gae_without_discount_is_reward_to_go(batch: Batch):
    _, returns = alg.gae(batch.rewards, batch.values, batch.mask)
    _, to_go = alg.reinforce_pp(batch.rewards, batch.mask)
    assert close(returns, to_go)
    adv, returns = alg.remax(batch.rewards, torch.zeros(len(batch.scores)), batch.mask)
    assert torch.equal(adv, returns) and torch.equal(returns, to_go)


@few
@given(batch=batches())
def test_whitening_gives_mean_zero_and_variance_one(batch: Batch):
    white = alg.masked_whiten(batch.rewards, batch.mask)
    assert abs(alg.masked_mean(white, batch.mask).item()) < 1e-9
    if batch.mask.sum() > 1:
        assert alg.masked_var(white, batch.mask).item() == pytest.approx(1, rel=1e-4)


@few
@given(batch=batches())
def test_offpolicy_metrics_ignore_masked_values(batch: Batch):
    found = alg.offpolicy_metrics(batch.logp, batch.old, batch.mask)
    assert alg.offpolicy_metrics(*(getattr(with_junk(batch), n) for n in ("logp", "old")),
                                 batch.mask) == found  # fmt: skip
    assert all(math.isfinite(value) for value in found.values())
    same = alg.offpolicy_metrics(batch.old, batch.old, batch.mask)
    assert same.pop("training_ppl") == same.pop("rollout_ppl")
    assert set(same.values()) <= {0.0}


@few
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=6),
    st.floats(0.2, 3),
    st.floats(-10, 10),
)
def test_log_probs_sum_to_one_and_ignore_a_shift(values: list[float], temperature, shift):
    logits = torch.tensor(values, dtype=torch.float64)
    ids = torch.arange(len(values))
    wide = logits.expand(len(values), -1)
    logp = alg.token_logp(wide, ids, temperature)
    assert logp.exp().sum().item() == pytest.approx(1)
    assert close(alg.token_logp(wide + shift, ids, temperature), logp, rtol=1e-6, atol=1e-9)
    entropy = alg.token_entropy(logits, temperature).item()
    expected = -sum(math.exp(x) * x for x in logp.tolist())
    assert entropy == pytest.approx(expected, rel=1e-6, abs=1e-9)
    narrow = alg.token_logp(wide.float(), ids, temperature)
    assert close(narrow.double(), logp, rtol=2e-4, atol=2e-4)
