"""Keys that others leave without effect: each is noticed, and has an effect with its switch on."""

import pytest

from rlcore.config.idle import IDLE, idle_keys
from rlcore.config.load import examine
from rlcore.config.tree import all_fields, put

A = "actor_rollout_ref."
V1 = "trainer.v1."
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
QUEUE = "transfer_queue.backend."
IN_MOONCAKE = f"{QUEUE}storage_backend=MooncakeStore"
GAE = "algorithm.adv_estimator=gae"
# Per row of IDLE: a key with a value, and the overrides that give it an effect.
SWITCHES = {
    f"{A}actor.ppo_micro_batch_size_per_gpu=4": [f"{A}actor.use_dynamic_bsz=false"],
    f"{A}actor.ppo_max_token_len_per_gpu=999": [f"{A}actor.use_dynamic_bsz=true"],
    "algorithm.filter_groups.metric=acc": ["algorithm.filter_groups.enable=true"],
    f"{OVERLONG}len=4": [f"{OVERLONG}enable=true", "reward.reward_manager.name=dapo"],
    "reward.estimated_tokens_per_request=5": [
        "reward.reward_manager.name=rate_limited",
        "reward.max_tpm=100",
    ],
    "reward.custom_reward_function.name=mine": ["reward.custom_reward_function.path=x.py"],
    f"{V1}sampler.max_off_policy_threshold=4": [f"{V1}trainer_mode=colocate_async"],
    f"{V1}sampler.sampler_kwargs={{a: 1}}": [
        f"{V1}sampler.custom_sampler.path=x.py",
        f"{V1}sampler.custom_sampler.name=X",
    ],
    f"{A}actor.policy_loss.decoupled_cap_mode=mask": [
        f"{A}actor.policy_loss.loss_mode=decoupled_ppo",
        f"{A}actor.policy_loss.decoupled_cap=5",
    ],
    f"{A}rollout.val_kwargs.top_p=0.7": [
        f"{A}rollout.val_kwargs.do_sample=true",
        f"{A}rollout.val_kwargs.temperature=1",
    ],
    f"{A}rollout.checkpoint_engine.update_weights_bucket_megabytes=64": [
        f"{A}rollout.checkpoint_engine.backend=shm"
    ],
    "critic.ppo_micro_batch_size_per_gpu=4": [GAE, "critic.use_dynamic_bsz=false"],
    "critic.ppo_max_token_len_per_gpu=999": [GAE, "critic.use_dynamic_bsz=true"],
    f"{A}rollout.max_num_batched_tokens=4096": [f"{A}rollout.name=vllm"],
    f"{A}rollout.sleep_level=2": [f"{A}rollout.name=vllm", "trainer.device=cuda"],
    "deadlines.save_snapshot=9": [],
    "ray.num_cpus=2": [],
    f"{QUEUE}SimpleStorage.total_storage_size=5000": [],
    f"{QUEUE}MooncakeStore.protocol=rdma": [IN_MOONCAKE],
    f"{QUEUE}MooncakeStore.metadata_server=localhost:1": [IN_MOONCAKE],
    f"{QUEUE}MooncakeStore.device_name=mlx5_0": [
        IN_MOONCAKE,
        f"{QUEUE}MooncakeStore.protocol=rdma",
    ],
}
OFF = {
    "critic.ppo_micro_batch_size_per_gpu=4": [GAE, "critic.use_dynamic_bsz=true"],
    "critic.ppo_max_token_len_per_gpu=999": [
        GAE,
        "critic.use_dynamic_bsz=false",
        "critic.ppo_micro_batch_size_per_gpu=4",
    ],
    f"{QUEUE}SimpleStorage.total_storage_size=5000": [IN_MOONCAKE],
    f"{QUEUE}MooncakeStore.metadata_server=localhost:1": [
        IN_MOONCAKE,
        f"{QUEUE}MooncakeStore.auto_init=true",
    ],
    f"{QUEUE}MooncakeStore.device_name=mlx5_0": [IN_MOONCAKE],
    f"{A}actor.ppo_max_token_len_per_gpu=999": [
        f"{A}actor.use_dynamic_bsz=false",
        f"{A}actor.ppo_micro_batch_size_per_gpu=4",
    ],
    f"{A}actor.policy_loss.decoupled_cap_mode=mask": [
        f"{A}actor.policy_loss.loss_mode=decoupled_ppo"
    ],
    "deadlines.save_snapshot=9": ["trainer.snapshots=false"],
    "ray.num_cpus=2": ["ray.address=127.0.0.1:1"],
}


def notices_of(key, overrides):
    return [n for n in examine("grpo-tiny", overrides).notices if n.startswith(f"{key}=")]


def test_every_row_is_tried():
    tried = {text.partition("=")[0] for text in SWITCHES}
    assert [row for row in IDLE if not tried & set(row.keys)] == []
    assert {key for row in IDLE for key in row.keys} <= set(all_fields())


@pytest.mark.parametrize("text", SWITCHES)
def test_a_key_without_its_switch_is_noticed(text):
    key = text.partition("=")[0]
    (notice,) = notices_of(key, [*OFF.get(text, []), text])
    assert "it has no effect with " in notice
    assert notices_of(key, [*SWITCHES[text], text]) == []


def test_what_was_not_given_is_not_noticed():
    config = examine("grpo-tiny", []).config
    assert idle_keys({}, config) == []
    tree = put({}, "algorithm.filter_groups.metric", "acc")
    (notice,) = idle_keys(tree, config)
    assert notice == (
        "algorithm.filter_groups.metric=acc: it has no effect with "
        "algorithm.filter_groups.enable=false"
    )
