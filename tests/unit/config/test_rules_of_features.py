"""Rules about keys that are not read yet: each asked directly, on configurations nobody checked."""

import pytest

from rlcore.config.reward_rules import late_rewards_have_no_baseline
from rlcore.config.rules_algorithm import (
    bypass_has_a_loss_that_uses_it,
    critic_and_estimator_agree,
    estimator_and_loss_read_their_keys,
    filter_has_its_rewards,
    gdpo_names_its_rewards,
    group_has_two_sessions,
    lora_keys_need_a_rank,
    thresholds_can_be_read,
)
from rlcore.config.rules_async import (
    separate_async_is_whole,
    storage_holds_what_is_in_flight,
    warm_up_stays_fresh,
)
from rlcore.config.rules_batches import (
    mini_batch_is_shared_out_evenly,
    mini_batch_is_whole_micro_batches,
)
from rlcore.config.rules_devices import count_gpus, pools_fit_the_host
from rlcore.config.rules_rollout import (
    engine_reads_whole_trajectories,
    reward_manager_has_a_place,
    reward_model_is_named,
)
from rlcore.config.rules_training import critic_is_cut_by_something
from rlcore.testing.unchecked import unchecked_config

A = "actor_rollout_ref."
ACTOR = f"{A}actor."
ROLLOUT = f"{A}rollout."
RC = "algorithm.rollout_correction."
LOSS = f"{ACTOR}policy_loss.loss_mode"
V1 = "trainer.v1."
ESTIMATOR = "algorithm.adv_estimator"
SEPARATE = {f"{V1}trainer_mode": "separate_async", f"{V1}separate_async.parameter_sync_step": 2}

TEACHER_ALONE = {
    "distillation.enabled": True,
    "distillation.distillation_loss.use_task_rewards": False,
}


def problems(rule, values, **more):
    return {p.path: p for p in rule(unchecked_config(values), **more)}


@pytest.mark.parametrize(
    ("rule", "values", "path", "words"),
    [
        (group_has_two_sessions, {ESTIMATOR: "rloo", f"{ROLLOUT}n": 1}, f"{ROLLOUT}n", "rloo"),
        (
            group_has_two_sessions,
            {**TEACHER_ALONE, ESTIMATOR: "grpo_passk", f"{ROLLOUT}n": 1},
            f"{ROLLOUT}n",
            "grpo_passk",
        ),
        (
            estimator_and_loss_read_their_keys,
            {ESTIMATOR: "rloo", "algorithm.lam": 0.9},
            "algorithm.lam",
            "adv_estimator=rloo",
        ),
        (
            estimator_and_loss_read_their_keys,
            {LOSS: "sapo", f"{ACTOR}clip_ratio_high": 0.3},
            f"{ACTOR}clip_ratio_high",
            "loss_mode=sapo",
        ),
        (
            critic_and_estimator_agree,
            {ESTIMATOR: "gae", "critic.enable": False},
            "critic.enable",
            "contradicts",
        ),
        (critic_and_estimator_agree, {"critic.enable": True}, "critic.enable", "reads no values"),
        (
            gdpo_names_its_rewards,
            {"algorithm.gdpo_reward_keys": ("a", "b"), "algorithm.gdpo_reward_weights": (1.0,)},
            "algorithm.gdpo_reward_weights",
            "1 weights for 2",
        ),
        (
            filter_has_its_rewards,
            {
                "algorithm.filter_groups.enable": True,
                "algorithm.filter_groups.metric": "acc",
                "reward.reward_model.enable": True,
            },
            "algorithm.filter_groups.enable",
            "reward.reward_model.enable_resource_pool=false",
        ),
        (
            thresholds_can_be_read,
            {f"{RC}rollout_rs_threshold": 2.0},
            f"{RC}rollout_rs_threshold",
            "no effect without",
        ),
        (bypass_has_a_loss_that_uses_it, {LOSS: "bypass_mode"}, LOSS, "bypass_mode=false"),
        (
            bypass_has_a_loss_that_uses_it,
            {f"{RC}bypass_mode": True, LOSS: "gpg"},
            f"{RC}bypass_mode",
            "reads no old log-probs",
        ),
        (
            bypass_has_a_loss_that_uses_it,
            {f"{RC}bypass_mode": True, f"{RC}loss_type": "reinforce", LOSS: "gspo"},
            f"{RC}loss_type",
            "loss_mode=gspo",
        ),
        (
            bypass_has_a_loss_that_uses_it,
            {f"{RC}loss_type": "reinforce"},
            f"{RC}loss_type",
            "bypass_mode=false",
        ),
        (
            bypass_has_a_loss_that_uses_it,
            {f"{RC}bypass_mode": True, f"{RC}rollout_is": "token"},
            f"{RC}rollout_is",
            "count the gap twice",
        ),
        (
            lora_keys_need_a_rank,
            {f"{A}model.lora_adapter_path": "x"},
            f"{A}model.lora_adapter_path",
            "lora_rank=0",
        ),
        (
            separate_async_is_whole,
            {**SEPARATE, "reward.reward_model.enable": True},
            "reward.reward_model.enable_resource_pool",
            "no idle time",
        ),
        (
            separate_async_is_whole,
            SEPARATE,
            "data.train_batch_size",
            "parameter_sync_step 2 x ppo_mini_batch_size 4 = 8 prompts, not 4",
        ),
        (
            warm_up_stays_fresh,
            {**SEPARATE, f"{V1}sampler.max_off_policy_threshold": 2,
             f"{V1}separate_async.num_warmup_batches": 1.5},
            f"{V1}separate_async.num_warmup_batches",
            "waits 1.5 steps",
        ),
        (
            storage_holds_what_is_in_flight,
            {**SEPARATE, "transfer_queue.backend.SimpleStorage.total_storage_size": 20},
            "transfer_queue.backend.SimpleStorage.total_storage_size",
            "= 32 trajectories",
        ),
        (
            storage_holds_what_is_in_flight,
            {"transfer_queue.backend.storage_backend": "MooncakeStore",
             "transfer_queue.backend.MooncakeStore.global_segment_size": 4000},
            "transfer_queue.backend.MooncakeStore.global_segment_size",
            "(trainer.v1.trainer_mode=sync); it holds 1 of up to",
        ),
        (
            mini_batch_is_shared_out_evenly,
            {"trainer.n_gpus_per_node": 3},
            "trainer.n_gpus_per_node",
            "16 trajectories = 5 x 3 ranks (trainer.nnodes 1 x n_gpus_per_node 3) + 1",
        ),
        (
            mini_batch_is_whole_micro_batches,
            {"trainer.n_gpus_per_node": 2, f"{ACTOR}use_dynamic_bsz": False,
             f"{ACTOR}ppo_micro_batch_size_per_gpu": 3},
            f"{ACTOR}ppo_micro_batch_size_per_gpu",
            "16 trajectories / 2 ranks = 8 = 2 x 3 + 2",
        ),
        (
            engine_reads_whole_trajectories,
            {f"{ROLLOUT}max_model_len": 70},
            f"{ROLLOUT}max_model_len",
            "64 + max_response_length 8 = 72 tokens",
        ),
        (
            reward_manager_has_a_place,
            {"reward.reward_manager.source": "importlib"},
            "reward.reward_manager.module.path",
            "needs it",
        ),
        (
            critic_is_cut_by_something,
            {ESTIMATOR: "gae", f"{ACTOR}use_dynamic_bsz": True, "critic.use_dynamic_bsz": False},
            "critic.ppo_micro_batch_size_per_gpu",
            "nothing says how the critic's",
        ),
        (
            late_rewards_have_no_baseline,
            {ESTIMATOR: "remax", "reward.reward_model.enable": True,
             "reward.reward_model.model_path": "x"},
            ESTIMATOR,
            "in which the greedy response is not",
        ),
        (
            reward_model_is_named,
            {"reward.reward_model.enable": True, "reward.reward_model.model_path": "x",
             "reward.reward_model.enable_resource_pool": True},
            "reward.reward_model.nnodes",
            "nnodes 0 x n_gpus_per_node 8 = 0",
        ),
    ],
)  # fmt: skip
def test_broken(rule, values, path, words):
    found = problems(rule, values)
    assert words in found[path].reason
    assert found[path].fix


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (group_has_two_sessions, {ESTIMATOR: "gae", f"{ROLLOUT}n": 1}),
        (group_has_two_sessions, {ESTIMATOR: "of_a_user", f"{ROLLOUT}n": 1}),
        (group_has_two_sessions, {**TEACHER_ALONE, f"{ROLLOUT}n": 1}),
        (
            estimator_and_loss_read_their_keys,
            {**TEACHER_ALONE, LOSS: "gmpo", f"{ACTOR}loss_agg_mode": "token-sum"},
        ),
        (estimator_and_loss_read_their_keys, {ESTIMATOR: "gae", "algorithm.lam": 0.9}),
        (estimator_and_loss_read_their_keys, {ESTIMATOR: "of_a_user", "algorithm.lam": 0.9}),
        (bypass_has_a_loss_that_uses_it, {f"{RC}bypass_mode": True}),
        (
            bypass_has_a_loss_that_uses_it,
            {f"{RC}bypass_mode": True, f"{RC}loss_type": "reinforce", f"{RC}rollout_is": "token"},
        ),
        (thresholds_can_be_read, {f"{RC}rollout_rs": "token_k1", f"{RC}rollout_rs_threshold": 2.0}),
        (warm_up_stays_fresh, SEPARATE),
        (warm_up_stays_fresh, {**SEPARATE, f"{V1}sampler.max_off_policy_threshold": None}),
        (mini_batch_is_shared_out_evenly, {"trainer.n_gpus_per_node": 4}),
    ],
)
def test_kept(rule, values):
    assert problems(rule, values) == {}


def test_pools_that_overlap_are_summed_up():
    values = {
        **SEPARATE,
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 4,
        f"{ROLLOUT}nnodes": 1,
        f"{ROLLOUT}n_gpus_per_node": 4,
    }
    (problem,) = problems(pools_fit_the_host, values, num_gpus=6).values()
    assert problem.path == "trainer.n_gpus_per_node"
    assert (
        "trainer.n_gpus_per_node 4 + actor_rollout_ref.rollout.n_gpus_per_node 4 = 8, this host "
        "has 6"
    ) in problem.reason
    assert problems(pools_fit_the_host, values, num_gpus=8) == {}
    assert problems(pools_fit_the_host, {**values, "ray.address": "auto"}, num_gpus=0) == {}


def test_a_local_cluster_has_one_host():
    found = problems(pools_fit_the_host, {"trainer.nnodes": 2})
    assert "on this host alone" in found["trainer.nnodes"].reason


def test_devices_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia0extra"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    found = problems(pools_fit_the_host, {"trainer.device": "cuda"}, num_gpus=0)
    assert found["trainer.device"].reason == "this host has no NVIDIA device"
