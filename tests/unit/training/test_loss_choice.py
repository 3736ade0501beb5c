"""From the configuration to loss and correction, and what the worker makes of them."""

import math

import pytest
import torch

from rlcore.algorithms import POLICY_LOSSES, register_policy_loss, reinforce_loss
from rlcore.config import load_config
from rlcore.errors import ConfigError
from rlcore.training.loss_choice import loss_choice
from rlcore.training.worker import TrainingWorker

ACTOR = "actor_rollout_ref.actor."
LOSS = f"{ACTOR}policy_loss.loss_mode="
CORRECTION = "algorithm.rollout_correction."


def choose(*overrides: str):
    return loss_choice(load_config("grpo-tiny", list(overrides)))


def test_settings_of_every_loss():
    clip = {"clip_low": 0.1, "clip_high": 0.3}
    given = (f"{ACTOR}clip_ratio_low=0.1", f"{ACTOR}clip_ratio_high=0.3")
    token, rows = {"agg": "token-mean"}, {"agg": "seq-mean-token-mean"}
    assert choose(*given).settings == {**clip, "dual_clip": 3.0, **token}
    assert choose(f"{LOSS}gspo", *given).settings == {**clip, **rows}
    # bounds become ratios
    assert choose(f"{LOSS}cispo", *given).settings == {"ratio_min": 0.9, "ratio_max": 1.3, **token}
    assert choose(f"{LOSS}sapo").settings == {"tau_pos": 1.0, "tau_neg": 1.05, **rows}
    assert choose(f"{LOSS}geo_mean", *given).settings == clip
    assert choose(f"{LOSS}gpg").settings == token
    decoupled = choose(f"{LOSS}decoupled_ppo", f"{ACTOR}policy_loss.decoupled_cap=2.5")
    assert decoupled.settings["cap"] == 2.5 and decoupled.settings["cap_mode"] == "truncate"


def test_a_loss_of_the_users_gets_what_it_declares():
    @register_policy_loss("test_mine", reads=("tau_pos", "agg", "clip_high"))
    def mine(inputs, agg_kw=None, **settings):
        return reinforce_loss(inputs.logp, inputs.adv, inputs.mask, agg_kw=agg_kw), {}

    chosen = choose(f"{LOSS}test_mine", "trainer.user_modules=[mine.py]")
    del POLICY_LOSSES._entries["test_mine"]
    assert chosen.settings == {"tau_pos": 1.0, "agg": "token-mean", "clip_high": 0.2}


def test_correction_of_the_batch_or_in_the_loss():
    weights = (f"{CORRECTION}rollout_is=token", f'{CORRECTION}rollout_is_threshold="0.5_2.0"')
    rejected = (f"{CORRECTION}rollout_rs=seq_max_k1", f"{CORRECTION}rollout_rs_threshold=2.0")
    chosen = choose(*weights, *rejected)
    assert (chosen.name, chosen.has_is_weights, chosen.has_train_mask) == ("vanilla", True, True)
    assert chosen.rejections == ()
    bypass = f"{CORRECTION}bypass_mode=true"
    chosen = choose(bypass, *rejected)
    assert (chosen.name, chosen.has_is_weights, chosen.has_train_mask) == (
        "bypass_mode", False, False)  # fmt: skip
    assert chosen.settings["loss_type"] == "ppo_clip" and chosen.settings["weights"] is None
    assert chosen.rejections == ({"stat": "ratio", "level": "seq_max", "lower": 0.5, "upper": 2.0},)
    chosen = choose(bypass, f"{CORRECTION}loss_type=reinforce", *weights)
    assert chosen.settings["weights"] == {
        "level": "token", "mode": "mask", "lower": 0.5, "upper": 2.0, "batch_normalize": False,
    }  # fmt: skip
    assert choose(bypass, f"{LOSS}gspo").name == "gspo"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{CORRECTION}rollout_is_threshold=3.0"], "no effect without"),
        ([f"{CORRECTION}rollout_is_batch_normalize=true"], "no effect without"),
        ([f"{LOSS}decoupled_ppo", f"{CORRECTION}rollout_is=token"], "would count twice"),
        ([f"{LOSS}decoupled_ppo", f"{CORRECTION}bypass_mode=true"], "takes for one"),
        (
            [f"{CORRECTION}{key}" for key in ("bypass_mode=true", "loss_type=reinforce",
             "rollout_is=token", "rollout_is_batch_normalize=true")],
            "one micro-batch at a time",
        ),
        ([f"{ACTOR}policy_loss.decoupled_cap=2.0"], "no effect with"),
        ([f"{LOSS}dppo_tv"], "not among the algorithms"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_or_counted_twice_is_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        choose(*overrides)


def update(make_spec, make_key, rows, groups, **spec) -> tuple[dict, torch.Tensor]:
    """Metrics of one update, and the weights after it."""
    worker = TrainingWorker(make_spec(**spec))
    metrics = worker.update_actor(make_key(1), rows, groups)
    return metrics, worker.policy.model.state_dict()["model.norm.weight"].clone()


def test_corrections_reach_the_weights(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    rows["old_log_probs"] = [torch.full_like(row, -4.0) for row in rows["old_log_probs"]]
    ones = [torch.ones(len(row)) for row in rows["responses"]]
    plain, before = update(make_spec, make_key, rows, groups)
    # a weight of 1 changes nothing, one of 2 doubles the loss
    rows["rollout_is_weights"] = ones
    same, weights = update(make_spec, make_key, rows, groups, has_is_weights=True)
    assert torch.equal(weights, before) and same["actor/pg_loss"] == plain["actor/pg_loss"]
    rows["rollout_is_weights"] = [2 * row for row in ones]
    doubled, _ = update(make_spec, make_key, rows, groups, has_is_weights=True)
    assert doubled["actor/pg_loss"] == pytest.approx(2 * plain["actor/pg_loss"], rel=1e-5)
    # masking a row counts as if it were not there
    rows["train_mask"] = [row * (index != 2) for index, row in enumerate(rows["response_mask"])]
    masked, _ = update(make_spec, make_key, rows, groups, has_train_mask=True)
    keep = [i for i in range(len(groups)) if i != 2]
    fewer = {name: [values[i] for i in keep] for name, values in rows.items()}
    without, _ = update(make_spec, make_key, fewer, [groups[i] for i in keep])
    assert masked["actor/pg_loss"] == pytest.approx(without["actor/pg_loss"], rel=1e-5)


def test_corrections_in_the_loss_keep_the_divisor(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    # ratios near e^-0.5 of the random model's log-probs: every token is rejected
    nothing, _ = update(
        make_spec, make_key, rows, groups, loss_mode="bypass_mode", rejections=({"upper": 1e-9},)
    )
    assert nothing["actor/pg_loss"] == 0 and nothing["actor/grad_norm"] == 0
    everything, _ = update(
        make_spec, make_key, rows, groups, loss_mode="bypass_mode", rejections=({"upper": 1e9},)
    )
    plain, _ = update(make_spec, make_key, rows, groups)
    assert everything["actor/pg_loss"] == plain["actor/pg_loss"] != 0
    kept, _ = update(make_spec, make_key, rows, groups, off_policy_delta=1e9)
    assert kept["actor/pg_loss"] == plain["actor/pg_loss"]
    dropped, _ = update(make_spec, make_key, rows, groups, off_policy_delta=-1e9)
    # only positive advantages are left
    assert dropped["actor/pg_loss"] < plain["actor/pg_loss"]
    assert math.isfinite(dropped["actor/pg_loss"])
