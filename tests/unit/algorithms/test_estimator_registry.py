"""Estimators under verl's names: they are the functions, with their settings and needs."""

import pytest
import torch

from rlcore.algorithms import (
    ADV_ESTIMATORS,
    GAE,
    REMAX,
    AdvantageInputs,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    register_adv_est,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from rlcore.config.names import kind_of
from rlcore.errors import ConfigError

SCORES = torch.tensor([1.0, 0.0, 3.0, 0.5])
GROUPS = ["a", "a", "b", "b"]
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1]])
REWARDS = torch.arange(12.0).view(4, 3) / 10
VALUES = torch.arange(12.0).view(4, 3).sin()
BASELINES = torch.tensor([0.5, 0.5, 1.0, 1.0])
MATRIX = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.5, 0.0]])


def batch(**changes) -> AdvantageInputs:
    fields = {
        "mask": MASK,
        "token_rewards": REWARDS,
        "scores": SCORES,
        "groups": GROUPS,
        "sessions": [0, 1, 0, 1],
        "out_index": [0, 0, 0, 0],
        "values": VALUES,
        "baselines": BASELINES,
        "score_matrix": MATRIX,
    }
    return AdvantageInputs(**{**fields, **changes})


def entry(name: str):
    """The estimator of a name; two wait for a trainer that has what they need."""
    return {"gae": GAE, "remax": REMAX}.get(name) or ADV_ESTIMATORS.get(name)


def same(function, **kw):
    advantages = function(SCORES, GROUPS, MASK, **kw)
    return advantages, advantages


ESTIMATORS = [
    (("grpo", "grpo_vectorized"), {}, same(grpo)),
    (("grpo",), {"norm_by_std": False}, same(dr_grpo)),
    (("grpo",), {"std_level": "batch"}, same(grpo, std_level="batch")),
    (("dr_grpo",), {}, same(dr_grpo)),
    (("rloo", "rloo_vectorized"), {}, same(rloo)),
    (("grpo_passk",), {}, same(grpo_passk)),
    (("grpo_passk",), {"norm_by_std": False}, same(grpo_passk, norm_by_std=False)),
    (("gpg",), {}, same(gpg)),
    (("gpg",), {"alpha_mode": "nonzero_scores"}, same(gpg, alpha_mode="nonzero_scores")),
    (("opo",), {}, same(opo)),
    (("reinforce_plus_plus_baseline", "reinforce_pp_baseline"), {}, same(reinforce_pp_baseline)),
    (("reinforce_pp_baseline",), {"whiten": False}, same(dr_grpo)),
    (("gdpo",), {}, (gdpo(MATRIX, GROUPS, MASK),) * 2),
    (
        ("gdpo",),
        {"weights": [1.0, 0.5], "norm_by_std": False, "batch_norm": "token"},
        (gdpo(MATRIX, GROUPS, MASK, [1.0, 0.5], norm_by_std=False, batch_norm="token"),) * 2,
    ),
    (("gae",), {}, gae(REWARDS, VALUES, MASK, whiten=True)),
    (
        ("gae",),
        {"gamma": 0.9, "lam": 0.8, "whiten": False},
        gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8),
    ),
    (("remax",), {}, remax(REWARDS, BASELINES, MASK)),
    (("reinforce_plus_plus", "reinforce_pp"), {}, reinforce_pp(REWARDS, MASK)),
    (
        ("reinforce_plus_plus",),
        {"gamma": 0.9, "whiten": False},
        reinforce_pp(REWARDS, MASK, gamma=0.9, whiten=False),
    ),
]


@pytest.mark.parametrize(("names", "settings", "expected"), ESTIMATORS)
def test_an_estimator_is_its_function(names, settings, expected):
    for name in names:
        estimator = entry(name)
        found = estimator(batch(), **settings)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert set(settings) - {"std_level"} <= estimator.reads


def test_every_estimator_is_compared():
    names = {name for names, _, _ in ESTIMATORS for name in names}
    assert names == {*kind_of("algorithm.adv_estimator").works, "gae", "remax"}


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "gpg", "opo", "gdpo", "reinforce_pp_baseline"]
)
def test_groups_of_one_by_setting(name):
    # gdpo and the whitened one end at 0 or not by what else is in the batch: look at the others
    inputs = batch(groups=["a", "b", "c", "d"])
    extra = {"gdpo": {"batch_norm": "none"}, "reinforce_pp_baseline": {"whiten": False}}
    settings = extra.get(name, {})
    zero, _ = ADV_ESTIMATORS.get(name)(inputs, **settings)
    raw, _ = ADV_ESTIMATORS.get(name)(inputs, singleton="raw", **settings)
    assert zero.abs().max().item() == 0
    # the sum of two rewards; 3 times alpha = 4 rows / at least 1 that teaches
    score = {"gdpo": 4.0, "gpg": 12.0}.get(name, 3.0)
    assert raw[2].tolist() == pytest.approx([score] * 3, rel=1e-5)


def test_what_estimators_need():
    works = kind_of("algorithm.adv_estimator").works
    needs = {name: set(ADV_ESTIMATORS.get(name).needs) for name in works}
    assert (GAE.needs, REMAX.needs) == ({"values"}, {"baselines"})
    assert needs.pop("gdpo") == {"score_matrix", "single_output"}
    assert needs.pop("opo") == {"single_output"}
    assert set().union(*needs.values()) == set()
    for name, field in (("gae", "values"), ("remax", "baselines"), ("gdpo", "score_matrix")):
        with pytest.raises(ValueError, match=f"needs {field}, which the batch lacks"):
            entry(name)(batch(**{field: None}))


def test_several_outputs_of_a_session():
    # rows 0 and 1 are outputs 1 and 0 of one session
    inputs = batch(groups=["a"] * 4, sessions=[0, 0, 1, 2], out_index=[1, 0, 0, 0])
    # sessions 1, 3, 0.5: mean 1.5
    centred = [[-0.5, -0.5, 0], [-0.5, 0, 0], [1.5] * 3, [-1, 0, -1]]
    assert ADV_ESTIMATORS.get("dr_grpo")(inputs)[0].tolist() == centred
    assert ADV_ESTIMATORS.get("reinforce_pp_baseline")(inputs, whiten=False)[0].tolist() == centred
    best, _ = ADV_ESTIMATORS.get("grpo_passk")(inputs, norm_by_std=False)
    assert best.tolist() == [[0] * 3, [0] * 3, [2] * 3, [0] * 3]
    for name in ("opo", "gdpo"):
        with pytest.raises(ValueError, match="session 0 of prompt 'a' has 2"):
            ADV_ESTIMATORS.get(name)(inputs)
        # the first of two is named
        twice = batch(groups=["a", "a", "b", "b"], sessions=[7, 7, 8, 8], out_index=[0, 1, 0, 1])
        with pytest.raises(ValueError, match="session 7 of prompt 'a' has 2"):
            ADV_ESTIMATORS.get(name)(twice)
        with pytest.raises(ValueError, match="zip"):
            ADV_ESTIMATORS.get(name)(batch(sessions=[0, 1]))


def test_an_estimator_of_your_own():
    @register_adv_est("test_centred", "test_centred_alias", needs=("values",), reads=("scale",))
    def centred(inputs: AdvantageInputs, scale: float = 1.0):
        """Return what the doc says."""
        advantages = dr_grpo(inputs.scores, inputs.groups, inputs.mask) * scale
        return advantages, advantages

    found = ADV_ESTIMATORS.get("test_centred_alias")
    assert found.reads == {"scale"} and found.needs == {"values"}
    assert found(batch(), scale=2.0)[0][0].tolist() == [1, 1, 0]
    assert found.__doc__ == "Return what the doc says."
    with pytest.raises(ConfigError, match="registered twice"):

        @register_adv_est("test_centred")
        def another(inputs: AdvantageInputs):
            return inputs.token_rewards, inputs.token_rewards

    for name in [name for name in ADV_ESTIMATORS if name.startswith("test_")]:
        del ADV_ESTIMATORS._entries[name]


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="unknown advantage estimator 'optimal_token_baseline'"):
        ADV_ESTIMATORS.get("optimal_token_baseline")
