"""Whether every name that a configuration chooses by is registered, once user modules are loaded.

The configuration layer knows what ships without importing it; what a file of
`RunConfig.user_modules` registers is known only after the file was loaded. This happens in the
driver, before Ray or anything else is started.
"""

from collections.abc import Iterator
from typing import Any

from rlcore.agent_loop import environment_agent, openai_agent, single_turn, tool_agent
from rlcore.agent_loop.base import AGENT_LOOPS
from rlcore.agent_loop.choice import read_agent_loops
from rlcore.algorithms import ADV_ESTIMATORS, POLICY_LOSSES
from rlcore.checkpoint_engine import backends
from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, TransferSettings
from rlcore.config import RunConfig
from rlcore.config.names import KINDS, NamedKind
from rlcore.config.problems import Problem, report
from rlcore.errors import ConfigError
from rlcore.registry import Registry
from rlcore.reward.managers import REWARD_MANAGERS
from rlcore.rollout.engine import ENGINES
from rlcore.tracking.tracker import TRACKERS
from rlcore.trainer import modes
from rlcore.trainer.base import TRAINERS
from rlcore.user_code import load_user_modules

BUILT_IN = (environment_agent, openai_agent, single_turn, tool_agent, backends, modes)
"""Importing these registers what ships."""

_REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm.adv_estimator": ADV_ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    "trainer.v1.trainer_mode": TRAINERS,
    "actor_rollout_ref.rollout.name": ENGINES,
    "actor_rollout_ref.rollout.agent.default_agent_loop": AGENT_LOOPS,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": CHECKPOINT_ENGINES,
    "reward.reward_manager.name": REWARD_MANAGERS,
    "trainer.logger": TRACKERS,
}


def registered_names(key: str) -> list[str]:
    """Return the names that can be chosen at a key now, sorted."""
    # The console is the flow's own progress line and needs no tracker.
    extra = {"console"} if key == "trainer.logger" else set[str]()
    return sorted({*_REGISTRIES[key].names(), *extra})


def check_registered(config: RunConfig) -> None:
    """Load the user modules, and check every name that nothing built in has.

    Raises:
        ConfigError: a user module or the list of agent loops cannot be loaded, names are
            registered nowhere (all are listed), or what carries weights lacks its package.
    """
    load_user_modules(config.user_modules)
    problems = [
        _unregistered(kind, name, config)
        for kind in KINDS
        for name in kind.read(config)
        if name not in kind.works and name not in _known(kind, config)
    ]
    if not problems:
        problems = list(_unmet_needs(config))
    if problems:
        raise ConfigError(report(problems, "after loading what it names"))
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    CHECKPOINT_ENGINES.get(backend)(TransferSettings.from_config(config))


def _unmet_needs(config: RunConfig) -> Iterator[Problem]:
    """What an estimator of the user's asks for and nothing in the run makes."""
    name = config.algorithm.adv_estimator
    needs = ADV_ESTIMATORS.get(name).needs
    if "values" in needs and not config.needs_critic:
        yield Problem(
            path="algorithm.adv_estimator",
            value=name,
            reason="it needs values, and there is no critic",
            fix="set critic.enable=true",
            involves=("critic.enable",),
        )
    if "baselines" in needs and not config.needs_baseline:
        yield Problem(
            path="algorithm.adv_estimator",
            value=name,
            reason="it needs baselines, which are sampled for remax only",
            fix="compute them in the estimator from the group, or choose remax",
        )


def _known(kind: NamedKind, config: RunConfig) -> list[str]:
    path = kind.listed_in(config)
    listed = read_agent_loops(path) if path is not None else {}
    return sorted({*registered_names(kind.key), *listed})


def _unregistered(kind: NamedKind, name: str, config: RunConfig) -> Problem:
    path = kind.listed_in(config)
    files = ", ".join([*config.user_modules, *([path] if path is not None else [])])
    return Problem(
        path=kind.key,
        value=name,
        reason=f"no {kind.kind} of that name is registered, not by {files} either",
        fix=f"register it there ({kind.registered_by}), or choose from "
        f"{', '.join(_known(kind, config))}",
    )
