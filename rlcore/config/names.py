"""Names that the configuration chooses by: what ships, what verl has besides, what users register.

The registries themselves import torch; this table does not. `works` lists what can be chosen now
and equals the registry (a test compares them): whoever registers a new one adds one word here, and
takes it out of `not_yet` by that. A name that is not in the table is taken when the configuration
names files that register things (`RunConfig.user_modules`), and looked up in the registry after
these were loaded, before Ray starts (`rlcore.trainer.registered`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rlcore.config.problems import Problem, nearest
from rlcore.config.run import RunConfig

_ROLLOUT: Final = "actor_rollout_ref.rollout."


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedKind:
    """One key whose value is the name of something registered."""

    key: str
    kind: str
    """What the names stand for, in messages."""
    read: Callable[[RunConfig], tuple[str, ...]]
    """Returns the names that a configuration chooses."""
    works: tuple[str, ...]
    """Registered by what ships; sorted."""
    not_yet: tuple[str, ...] = ()
    """verl's names (or ours) of what is not there yet."""
    never: dict[str, str] = field(default_factory=dict[str, str])
    """verl's names of what has no counterpart, and why."""
    registered_by: str = ""
    """How a file of `trainer.user_modules` registers one."""
    listed_in: Callable[[RunConfig], str | None] = lambda _: None
    """Returns the file of the configuration that names more, if there is one."""
    list_key: str = ""
    """The key of that file."""
    suggestion: str = ""
    """What to set instead; empty: the only one that works, or the list."""

    def problem_with(self, name: str) -> Problem:
        """Return why `name` cannot be chosen."""
        if name in self.never:
            reason, known = self.never[name], True
        elif name in self.not_yet:
            reason, known = f"this {self.kind} is not there yet", True
        else:
            reason, known = f"there is no {self.kind} of that name", False
        return Problem(
            path=self.key,
            value=name,
            reason=reason,
            fix=self._fix(name, known),
            involves=(self.list_key,) if self.list_key else (),
            is_unsupported=known,
        )

    def _fix(self, name: str, is_verls: bool) -> str:
        guess = None if is_verls else nearest(name, self.works)
        instead = self.suggestion or (
            f"set it to {self.works[0]}"
            if len(self.works) == 1
            else f"choose from {', '.join(self.works)}"
        )
        if guess:
            return f"did you mean {guess}?"
        if is_verls:
            return instead
        lists = f", or list it in {self.list_key}" if self.list_key else ""
        return (
            f"{instead}; or register one of your own ({self.registered_by}) in a file of "
            f"trainer.user_modules{lists}"
        )


_NOT_IN_RLCORE: Final = "it is not among the algorithms of rollflow"

KINDS: tuple[NamedKind, ...] = (
    NamedKind(
        key="algorithm.adv_estimator",
        kind="advantage estimator",
        read=lambda config: (config.algorithm.adv_estimator,),
        works=(
            "dr_grpo", "gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo",
            "reinforce_plus_plus", "reinforce_plus_plus_baseline", "reinforce_pp",
            "reinforce_pp_baseline", "remax", "rloo", "rloo_vectorized",
        ),
        never={
            "optimal_token_baseline": _NOT_IN_RLCORE,
            "tir_optimal_token_baseline": _NOT_IN_RLCORE,
        },
        registered_by="@register_adv_est",
    ),
    NamedKind(
        key="actor_rollout_ref.actor.policy_loss.loss_mode",
        kind="policy loss",
        read=lambda config: (config.actor_rollout_ref.actor.policy_loss.loss_mode,),
        works=(
            "bypass_mode", "cispo", "decoupled_ppo", "geo_mean", "gmpo", "gpg", "gspo",
            "reinforce", "sapo", "vanilla",
        ),
        never=dict.fromkeys(("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro"), _NOT_IN_RLCORE),
        registered_by="@register_policy_loss",
    ),
    NamedKind(
        key="trainer.v1.trainer_mode",
        kind="trainer mode",
        read=lambda config: (config.trainer.v1.trainer_mode,),
        works=("colocate_async", "separate_async", "sync"),
        registered_by="@register_trainer",
    ),
    NamedKind(
        key=f"{_ROLLOUT}name",
        kind="engine",
        read=lambda config: (config.actor_rollout_ref.rollout.name,),
        works=("transformers", "vllm"),
        never=dict.fromkeys(
            ("sglang", "trtllm", "hf"), "the engines of rollflow are transformers and vllm"
        ),
        registered_by="@ENGINES.register",
        suggestion="set it to transformers, which runs on any CPU",
    ),
    NamedKind(
        key=f"{_ROLLOUT}agent.default_agent_loop",
        kind="agent loop",
        read=lambda config: (config.actor_rollout_ref.rollout.agent.default_agent_loop,),
        works=("environment_agent", "openai_agent", "single_turn_agent", "tool_agent"),
        listed_in=lambda config: config.actor_rollout_ref.rollout.agent.agent_loop_config_path,
        list_key=f"{_ROLLOUT}agent.agent_loop_config_path",
        never={"diffusion_single_turn_agent": "there are no image models"},
        registered_by="@register of rlcore.agent_loop",
    ),
    NamedKind(
        key=f"{_ROLLOUT}checkpoint_engine.backend",
        kind="back end of weight updates",
        read=lambda config: (config.actor_rollout_ref.rollout.checkpoint_engine.backend,),
        works=("gloo", "kimi_ckpt_engine", "mooncake", "naive", "nccl", "shm"),
        never=dict.fromkeys(
            ("hccl", "nixl", "delta_sharded", "delta"), "no such transport is planned"
        ),
        registered_by="@CHECKPOINT_ENGINES.register",
    ),
    NamedKind(
        key="reward.reward_manager.name",
        kind="reward manager",
        read=lambda config: (config.reward.reward_manager.name,),
        works=("dapo", "limited", "naive", "rate_limited"),
        not_yet=("gdpo", "remote"),
        registered_by="@REWARD_MANAGERS.register",
    ),
    NamedKind(
        key="trainer.logger",
        kind="tracker",
        read=lambda config: config.trainer.logger,
        works=("console", "file", "tensorboard", "wandb"),
        never=dict.fromkeys(
            ("mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio", "rl_insight"),
            "the trackers of rollflow are console, file, tensorboard and wandb",
        ),
        registered_by="@TRACKERS.register",
    ),
)  # fmt: skip


def kind_of(key: str) -> NamedKind:
    """Return the table's entry of a key."""
    return next(kind for kind in KINDS if kind.key == key)


def unknown_names(config: RunConfig) -> Iterator[Problem]:
    """Names that nothing registers; user modules and lists are looked into after loading."""
    if config.user_modules:
        return
    for kind in KINDS:
        if kind.listed_in(config) is not None:
            continue
        for name in kind.read(config):
            if name not in kind.works:
                yield kind.problem_with(name)
