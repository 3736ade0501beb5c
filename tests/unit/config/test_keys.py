"""The three classes of keys, and problems told all at once."""

import pytest

from rlcore.config import load_config, resolve_config
from rlcore.config.load import examine
from rlcore.config.overrides import parse_overrides
from rlcore.config.problems import nearest, show
from rlcore.config.refused_values import REFUSED_VALUES
from rlcore.config.report import settings
from rlcore.config.tree import all_fields, section_paths
from rlcore.config.verl_keys import VERL_KEYS
from rlcore.errors import ConfigError, UnsupportedVerlKeyError

A = "actor_rollout_ref."


def problems_of(*overrides):
    return {problem.path: problem for problem in examine("grpo-tiny", list(overrides)).problems}


@pytest.mark.parametrize(
    "override",
    [
        "trainer.balance_batch=True",
        "trainer.use_v1=True",
        "data.return_raw_chat=True",
        "data.dataloader_num_workers=4",
        f"{A}hybrid_engine=True",
        f"{A}model.use_remove_padding=True",
        f"{A}actor.strategy=fsdp2",
        f"{A}actor.fsdp_config.param_offload=True",
        f"{A}actor.checkpoint.save_contents=[model,optimizer,extra]",
        f"{A}rollout.load_format=auto",
        f"{A}rollout.free_cache_engine=False",
        f"{A}rollout.mode=async",
        f"{A}rollout.multi_turn.enable=True",
        f"{A}rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
        f"{A}ref.fsdp_config.param_offload=True",
        "transfer_queue.enable=True",
    ],
)
def test_satisfied_keys_give_one_notice(override):
    resolved = resolve_config("grpo-tiny", [override])
    key = override.split("=")[0]
    assert [notice.split("=")[0] for notice in resolved.notices] == [key]
    assert settings(resolved.config) == settings(load_config("grpo-tiny"))


@pytest.mark.parametrize(
    ("override", "in_reason", "in_fix"),
    [
        ("trainer.use_v1=False", "legacy", "leave it out"),
        (f"{A}actor.ppo_micro_batch_size=4", "replaced", "ppo_micro_batch_size_per_gpu"),
        (f"{A}actor.strategy=megatron", "FSDP2", "leave it out"),
        (f"{A}actor.policy_loss.clip_cov_ratio=0.1", "not among the losses", "leave it out"),
        (f"{A}actor.optim.warmup_style=cosine", "renamed", "lr_scheduler_type"),
        (f"{A}rollout.mode=sync", "servers", "leave it out"),
        (f"{A}rollout.response_length=4", "data's", "data.max_response_length"),
        (f"{A}rollout.multi_turn.tool_config_path=x.yaml", "functions", "function_tool_path"),
        (f"{A}rollout.multi_turn.num_repeat_rollouts=2", "does not read", "rollout.n"),
        ("reward.reward_manager.source=importlib", "by name", "@REWARD_MANAGERS.register"),
        ("custom_reward_function.path=x.py", "moved", "reward.custom_reward_function"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch=True", "lent", "leave it out"),
        ("trainer.v1.sampler.sync_refill_failed_groups=False", "replaced", "leave it out"),
        ("ray_kwargs.ray_init.num_cpus=8", "own", "ray.num_cpus"),
        # values of honoured keys
        (f"{A}actor.policy_loss.loss_mode=dro", "not among the algorithms", "vanilla"),
        (f"{A}rollout.name=vllm", "not installed here", "make setup-vllm"),
        (f"{A}rollout.top_p=0.9", "cannot reproduce", "1"),
        (f"{A}rollout.top_k=50", "cannot reproduce", "-1"),
        (f"{A}rollout.calculate_log_probs=False", "anyway", "leave it out"),
        (f"{A}rollout.dtype=float16", "bfloat16 or float32", "one of the two"),
        (f"{A}rollout.checkpoint_engine.backend=nccl", "needs 2 GPUs", "shm"),
        ("trainer.logger=[console,mlflow]", "tracker", "tensorboard"),
        ("trainer.logger=mlflow", "tracker", "tensorboard"),
        ("trainer.device=cuda", "CPU", "cpu"),
        ("trainer.nnodes=2", "one host", "1"),
    ],
)
def test_refused_keys_say_why_and_what_instead(override, in_reason, in_fix):
    key = override.split("=")[0]
    problem = problems_of(override)[key]
    assert problem.is_unsupported
    assert in_reason in problem.reason
    assert in_fix in problem.fix
    with pytest.raises(ConfigError, match=key) as caught:
        load_config("grpo-tiny", [override])
    # What a rule adds about the key's consequences is no key of verl's that is missing.
    is_alone = len(problems_of(override)) == 1
    assert isinstance(caught.value, UnsupportedVerlKeyError) == is_alone


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("data.train_batch_sise=8", "data.train_batch_size"),
        ("train_batch_size=8", "data.train_batch_size"),
        ("actor.optim.lr=1e-5", f"{A}actor.optim.lr"),
        (f"{A}rollout.max_num_seq=64", f"{A}rollout.max_num_seqs"),
        ("trainer.total_steps=3", "trainer.total_epochs"),
        ("Trainer.save_freq=3", "trainer.save_freq"),
    ],
)
def test_unknown_keys_name_the_nearest(override, meant):
    problem = problems_of(override)[override.split("=")[0]]
    assert problem.reason == "there is no such key"
    assert problem.fix == f"did you mean {meant}?"
    assert not problem.is_unsupported


def test_a_key_like_no_other_gets_no_guess():
    assert "--all" in problems_of("zzz.qqq=1")["zzz.qqq"].fix
    assert nearest("qqq", ["a.b"]) is None


def test_a_section_is_no_value():
    found = problems_of("data=3", "data.train_batch_size=4")
    assert list(found) == ["data"]
    assert "data.train_files" in found["data"].fix


def test_an_empty_section_is_its_defaults():
    resolved = resolve_config("grpo-tiny", config={"reward": None, "ray": {}})
    assert resolved.config == load_config("grpo-tiny")
    assert resolved.notices == []


def test_all_problems_are_listed_at_once():
    overrides = [
        "data.train_batch_sise=8",
        f"{A}rollout.n=0",
        "trainer.v1.trainer_mode=colocate_asinc",
        "trainer.use_v1=False",
        "algorithm.gamma=0.9",
        "trainer.logger=[console",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("grpo-tiny", overrides)
    message = str(caught.value)
    assert not isinstance(caught.value, UnsupportedVerlKeyError)
    assert message.startswith(
        "6 problems in the configuration (preset grpo-tiny with 6 overrides):\n"
    )
    for override in overrides:
        assert override.split("=")[0] in message
    assert message.count("fix: ") == 6


def test_overruled_keys_give_a_notice():
    micro = f"{A}actor.ppo_micro_batch_size_per_gpu"
    assert resolve_config("grpo-tiny", [f"{micro}=5"]).notices == [
        f"{micro}=5: it has no effect with use_dynamic_bsz=true"
    ]
    notices = resolve_config("grpo-tiny", [f"{A}actor.use_dynamic_bsz=false", f"{micro}=4"]).notices
    assert notices == [
        f"{A}actor.ppo_max_token_len_per_gpu=4096: it has no effect with use_dynamic_bsz=false"
    ]
    clips = [f"{A}actor.clip_ratio{side}=0.{k}" for k, side in ((1, ""), (2, "_low"), (3, "_high"))]
    assert resolve_config("grpo-tiny", clips).notices == [
        f"{A}actor.clip_ratio=0.1: clip_ratio_low and clip_ratio_high hold"
    ]


def test_tables_do_not_contradict_the_tree():
    for entry in VERL_KEYS:
        assert entry.pattern not in all_fields(), entry.pattern
        assert entry.pattern not in section_paths(), entry.pattern
        assert entry.reason
        assert entry.fix
    patterns = [entry.pattern for entry in VERL_KEYS]
    assert len(patterns) == len(set(patterns))
    assert set(REFUSED_VALUES) <= set(all_fields())


def test_no_entry_hides_behind_an_earlier_wildcard():
    for position, entry in enumerate(VERL_KEYS):
        for earlier in VERL_KEYS[:position]:
            assert not earlier.matches(entry.pattern.removesuffix(".*")), entry.pattern


def test_shown_values_can_be_typed_again():
    values = [None, True, 3, 1e-6, "models/x", ["a", 2, None], {"x": [1, 2], "y": {"z": False}}]
    for value in values:
        parsed, problems = parse_overrides([f"key={show(value)}"])
        assert problems == []
        assert parsed[0].value == value


def test_a_problem_reads_as_one_line():
    problem = problems_of("trainer.use_v1=False")["trainer.use_v1"]
    assert str(problem).startswith("trainer.use_v1=false: verl's legacy trainer has no counterpart")


def test_all_reasons_of_a_key_are_told_together():
    problem = problems_of("trainer.device=cuda", "ray.address=null")["trainer.device"]
    assert problem.reason.startswith("training runs on the CPU so far")
    assert problem.is_unsupported
    problem = problems_of("trainer.nnodes=2")["trainer.nnodes"]
    assert "; besides, ray.address=null starts a cluster on this host alone" in problem.reason
