"""Losses under verl's names: they are the functions, with their settings, needs and metrics."""

import math

import pytest
import torch

from rlcore.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    cispo_loss,
    decoupled_ppo_loss,
    drop_drifted,
    drop_rejected,
    gmpo_loss,
    gspo_loss,
    ppo_loss,
    register_policy_loss,
    reinforce_loss,
    sapo_loss,
)
from rlcore.config.names import kind_of
from rlcore.errors import ConfigError

OLD = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
LOGP = torch.tensor([[-0.7, -2.5], [-0.1, -1.5]])
ADV = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
ROLLOUT = torch.tensor([[-1.2, -2.0], [-0.6, -1.0]])
PLACES = torch.tensor([[1, 1], [1, 0]])
TERMS = (OLD, LOGP, ADV, PLACES)
WEIGHTS = torch.tensor([[0.5, 2.0], [3.0, 1.0]])
AGG = {"agg": "token-sum", "agg_kw": {"dp_size": 2}}


def micro(**changes) -> PolicyLossInputs:
    fields = {"old_logp": OLD, "logp": LOGP, "adv": ADV, "mask": PLACES}
    return PolicyLossInputs(**{**fields, **changes})


CLIP = {"clip_low": 0.1, "clip_high": 0.15}
LOSSES = [
    (("vanilla",), {}, lambda w, kw: ppo_loss(*TERMS, is_weights=w, **kw)),
    (("vanilla",), {**CLIP, "dual_clip": 1.2, **AGG},
     lambda w, kw: ppo_loss(*TERMS, is_weights=w, **kw)),
    (("gspo",), {}, lambda w, kw: gspo_loss(*TERMS, is_weights=w, **kw)),
    (("gspo",), {**CLIP, **AGG}, lambda w, kw: gspo_loss(*TERMS, is_weights=w, **kw)),
    (("geo_mean", "gmpo"), {}, lambda w, kw: gmpo_loss(*TERMS, is_weights=w, **kw)),
    (("gmpo",), {**CLIP, "agg_kw": {"dp_size": 2}},
     lambda w, kw: gmpo_loss(*TERMS, is_weights=w, **kw)),
    (("cispo",), {}, lambda w, kw: cispo_loss(*TERMS, is_weights=w, **kw)),
    (("cispo",), {"ratio_min": 0.9, "ratio_max": 1.1, **AGG},
     lambda w, kw: cispo_loss(*TERMS, is_weights=w, **kw)),
    (("sapo",), {}, lambda w, kw: sapo_loss(*TERMS, is_weights=w, **kw)),
    (("sapo",), {"tau_pos": 2.0, "tau_neg": 3.0, **AGG},
     lambda w, kw: sapo_loss(*TERMS, is_weights=w, **kw)),
    (("gpg", "reinforce"), {}, lambda w, kw: reinforce_loss(*TERMS[1:], is_weights=w, **kw)),
    (("gpg",), AGG, lambda w, kw: reinforce_loss(*TERMS[1:], is_weights=w, **kw)),
]  # fmt: skip


@pytest.mark.parametrize(("names", "settings", "expected"), LOSSES)
def test_a_loss_is_its_function(names, settings, expected):
    for name in names:
        entry = POLICY_LOSSES.get(name)
        for weights in (None, WEIGHTS):
            loss, metrics = entry(micro(is_weights=weights), **settings)
            assert loss.item() == expected(weights, settings).item()
            # old - new: -0.3, 0.5, -0.4
            assert metrics["ppo_kl"] == pytest.approx(-0.2 / 3)
        assert set(settings) - {"agg_kw"} <= entry.reads
        assert entry.is_silent_without_advantage and entry.takes_weights


def test_every_loss_is_compared():
    names = {name for names, _, _ in LOSSES for name in names}
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert names | {"decoupled_ppo", "bypass_mode"} == set(kind_of(key).works)


def test_decoupled_ppo_is_its_function():
    entry = POLICY_LOSSES.get("decoupled_ppo")
    for settings in ({}, {**CLIP, "dual_clip": 1.2, "cap": 1.1, "cap_mode": "mask", **AGG}):
        loss, metrics = entry(micro(rollout_logp=ROLLOUT), **settings)
        assert loss.item() == decoupled_ppo_loss(ROLLOUT, *TERMS, **settings).item()
    # r = e^0.3, e^-0.5 (A = 1) and e^0.4 (A = -1), clipped at 0.9 and 1.15, dual clip 1.2
    assert metrics == pytest.approx(
        {"pg_clipfrac": 1 / 3, "pg_clipfrac_lower": 1 / 3, "ppo_kl": -0.2 / 3}
    )
    with pytest.raises(ValueError, match="needs rollout_logp, which the batch lacks"):
        entry(micro())
    with pytest.raises(ValueError, match="would count the same gap twice"):
        entry(micro(rollout_logp=ROLLOUT, is_weights=WEIGHTS))
    assert entry.is_silent_without_advantage


def test_metrics_of_clipping():
    ratio = torch.tensor([[1.5, 0.5, 5.0, 1.0, 9.0]])
    inputs = PolicyLossInputs(
        old_logp=torch.zeros(1, 5),
        logp=ratio.log(),
        adv=torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]]),
        mask=torch.tensor([[1, 1, 1, 1, 0]]),
    )
    small = PolicyLossInputs(
        old_logp=inputs.old_logp, logp=inputs.logp, adv=inputs.adv / 4, mask=inputs.mask
    )
    # the size of the advantages plays no part
    assert POLICY_LOSSES.get("vanilla")(small, dual_clip=3.0)[1] == pytest.approx(
        POLICY_LOSSES.get("vanilla")(inputs, dual_clip=3.0)[1]
    )
    loss, metrics = POLICY_LOSSES.get("vanilla")(inputs, dual_clip=3.0)
    # -1.2 + 0.8 + 3 - 1
    assert loss.item() == pytest.approx(1.6 / 4)
    kl = -math.log(3.75) / 4
    assert metrics == pytest.approx({"pg_clipfrac": 0.5, "pg_clipfrac_lower": 0.25, "ppo_kl": kl})
    _, metrics = POLICY_LOSSES.get("vanilla")(inputs)
    assert metrics == pytest.approx({"pg_clipfrac": 0.5, "ppo_kl": kl})
    _, metrics = POLICY_LOSSES.get("vanilla")(inputs, clip_low=0.6, clip_high=0.6)
    assert metrics["pg_clipfrac"] == 0
    # 5 above the largest ratio, then 1.5 too, then 0.5 below the smallest
    for bounds, share in (({}, 0), ({"ratio_max": 4.0}, 0.25), ({"ratio_max": 1.2}, 0.5),
                          ({"ratio_min": 0.8, "ratio_max": 1.2}, 0.75)):  # fmt: skip
        assert POLICY_LOSSES.get("cispo")(inputs, **bounds)[1]["pg_clipfrac"] == share
    # bounded at ln 1.5 > 0.4 for A > 0 and ln 0.5 < -0.4 for A < 0
    assert POLICY_LOSSES.get("gmpo")(inputs)[1]["pg_clipfrac"] == 0.5
    assert POLICY_LOSSES.get("gmpo")(inputs, clip_high=0.5)[1]["pg_clipfrac"] == 0.25
    silent = PolicyLossInputs(
        old_logp=inputs.old_logp, logp=inputs.logp, adv=torch.zeros(1, 5), mask=inputs.mask
    )
    assert POLICY_LOSSES.get("gmpo")(silent)[1]["pg_clipfrac"] == 0
    # one ratio for the row, 3.75^(1/4) = 1.39, A = 1 and -1 twice each
    assert POLICY_LOSSES.get("gspo")(inputs)[1]["pg_clipfrac"] == 0.5
    assert POLICY_LOSSES.get("gspo")(inputs, clip_high=0.4)[1]["pg_clipfrac"] == 0
    assert POLICY_LOSSES.get("sapo")(inputs)[1] == pytest.approx({"ppo_kl": kl})
    # below the smallest ratio of every default, at a negative advantage
    low = PolicyLossInputs(
        old_logp=torch.zeros(1, 2),
        logp=torch.full((1, 2), -1.0),
        adv=-torch.ones(1, 2),
        mask=torch.ones(1, 2),
        rollout_logp=torch.zeros(1, 2),
    )
    for name in ("vanilla", "gspo", "gmpo", "decoupled_ppo"):
        assert POLICY_LOSSES.get(name)(low)[1]["pg_clipfrac"] == 1


def bypass(**kw) -> tuple[float, dict[str, float]]:
    loss, metrics = POLICY_LOSSES.get("bypass_mode")(micro(), **kw)
    return loss.item(), metrics


def test_bypass_mode_is_ppo_against_the_sampler():
    assert bypass()[0] == ppo_loss(*TERMS).item()
    settings = {**CLIP, "dual_clip": 1.2, **AGG}
    loss, metrics = bypass(**settings)
    assert loss == ppo_loss(*TERMS, **settings).item()
    assert metrics == POLICY_LOSSES.get("vanilla")(micro(), **settings)[1]
    # ratios e^0.3 = 1.35, e^-0.5 = 0.61, e^0.4 = 1.49: the last is dropped, the divisor stays 3
    kept = drop_rejected(micro(), [{"upper": 1.4}])
    assert kept.adv.tolist() == [[1, 1], [0, 0]]
    loss, _ = POLICY_LOSSES.get("bypass_mode")(kept)
    assert loss.item() == pytest.approx(-(1.2 + math.exp(-0.5)) / 3)
    # joined with another: 0.61 goes too
    kept = drop_rejected(micro(), [{"upper": 1.4}, {"lower": 0.7}])
    assert kept.adv.tolist() == [[1, 0], [0, 0]]
    inputs = micro(logp=LOGP.clone().requires_grad_())
    assert drop_rejected(inputs, []) is inputs
    assert drop_rejected(inputs, [{"upper": 1.4}]).logp is inputs.logp


def test_bypass_mode_by_weighted_policy_gradient():
    plain, metrics = bypass(loss_type="reinforce")
    assert plain == reinforce_loss(*TERMS[1:]).item()
    assert metrics.keys() == {"ppo_kl"}
    weighted, _ = bypass(loss_type="reinforce", weights={"upper": 1.4})
    # 0.7 e^0.3 + 2.5 e^-0.5 - 0.1 * 1.4
    expected = (0.7 * math.exp(0.3) + 2.5 * math.exp(-0.5) - 0.1 * 1.4) / 3
    assert weighted == pytest.approx(expected)
    summed, _ = bypass(loss_type="reinforce", weights={"upper": 1.4}, **AGG)
    assert summed == pytest.approx(6 * expected)


def test_bypass_mode_has_no_gradient_through_its_weight():
    logp = LOGP.clone().requires_grad_()
    loss, _ = POLICY_LOSSES.get("bypass_mode")(
        micro(logp=logp), loss_type="reinforce", weights={"upper": 9.0}, agg="token-sum"
    )
    loss.backward()
    expected = [-math.exp(0.3), -math.exp(-0.5), math.exp(0.4), 0]
    assert logp.grad.flatten().tolist() == pytest.approx(expected)


def test_bypass_mode_refuses_what_would_count_twice():
    with pytest.raises(ValueError, match="weights would count it twice"):
        bypass(weights={})
    with pytest.raises(ValueError, match="cannot normalise over the batch"):
        bypass(loss_type="reinforce", weights={"batch_normalize": True})
    assert math.isfinite(bypass(loss_type="reinforce", weights={"batch_normalize": False})[0])
    with pytest.raises((ValueError, TypeError), match=r"unknown loss_type|[Tt]ype-check"):
        bypass(loss_type="other")
    entry = POLICY_LOSSES.get("bypass_mode")
    with pytest.raises(ValueError, match="on top"):
        entry(micro(is_weights=WEIGHTS))
    assert entry.is_silent_without_advantage


def test_drifted_rows_lose_their_negative_tokens():
    # rows drift by (-0.3 + 0.5) / 2 = 0.1 and -0.4
    adv = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    inputs = micro(adv=adv, logp=LOGP.clone().requires_grad_())
    assert drop_drifted(inputs, 0.05).adv.tolist() == [[1, 0], [-1, 0]]
    assert drop_drifted(inputs, 0.2).adv.tolist() == [[1, -1], [-1, 0]]
    assert drop_drifted(inputs, 0.05).logp is inputs.logp


def test_a_loss_of_your_own():
    @register_policy_loss("test_plain", reads=("agg",))
    def plain(inputs: PolicyLossInputs, agg_kw=None, agg="token-mean"):
        return reinforce_loss(inputs.logp, inputs.adv, inputs.mask, agg, agg_kw), {"one": 1.0}

    loss = POLICY_LOSSES.get("test_plain")
    assert loss.needs == {"old_logp"} and loss.takes_weights
    assert not loss.is_silent_without_advantage
    # 0.7 + 2.5 - 0.1, twice
    value, metrics = loss(micro(), **AGG)
    assert value.item() == pytest.approx(6.2) and metrics == {"one": 1.0}
    with pytest.raises(ConfigError, match="registered twice"):

        @register_policy_loss("test_plain")
        def other(inputs: PolicyLossInputs, agg_kw=None):
            return inputs.logp.sum(), {}

    for name in [name for name in POLICY_LOSSES if name.startswith("test_")]:
        del POLICY_LOSSES._entries[name]


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="unknown policy loss 'dro'"):
        POLICY_LOSSES.get("dro")
