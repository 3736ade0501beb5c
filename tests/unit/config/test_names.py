"""Names that are registered: the table without torch equals the registries, and users' own."""

import json
import subprocess
import sys
import textwrap

import pytest

from rlcore.config import load_config
from rlcore.config.argument_table import ESTIMATORS, LOSSES
from rlcore.config.load import examine
from rlcore.config.names import KINDS, kind_of
from rlcore.errors import ConfigError
from rlcore.trainer.registered import check_registered, registered_names

A = "actor_rollout_ref."
LOSS = f"{A}actor.policy_loss.loss_mode"


def problems_of(*overrides):
    return {problem.path: problem for problem in examine("grpo-tiny", list(overrides)).problems}


SHIPPED = """
import json
from rlcore.config.names import KINDS
from rlcore.trainer.registered import registered_names
print(json.dumps({kind.key: registered_names(kind.key) for kind in KINDS}))
"""


@pytest.fixture(scope="module")
def shipped():
    """What is registered in a process that other tests registered nothing in."""
    done = subprocess.run(
        [sys.executable, "-c", SHIPPED], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_what_works_is_what_is_registered(kind, shipped):
    assert list(kind.works) == shipped[kind.key]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_no_name_is_in_two_classes(kind):
    assert not set(kind.never) & {*kind.works, *kind.not_yet}
    assert list(kind.works) == sorted(kind.works)


def test_every_estimator_and_loss_has_its_function():
    estimators, losses = kind_of("algorithm.adv_estimator"), kind_of(LOSS)
    assert set(ESTIMATORS) == {*estimators.works, *estimators.not_yet}
    assert set(LOSSES) | {"bypass_mode"} == {*losses.works, *losses.not_yet}


@pytest.mark.parametrize(
    ("override", "reason", "fix"),
    [
        ("algorithm.adv_estimator=grpoo", "no advantage estimator of that name", "grpo?"),
        ("algorithm.adv_estimator=optimal_token_baseline", "not among the algorithms", "grpo"),
        (f"{LOSS}=clip_cov", "not among the algorithms", "vanilla"),
        (f"{LOSS}=mine", "no policy loss of that name", "@register_policy_loss"),
        ("trainer.v1.trainer_mode=mine", "no trainer mode of that name", "trainer.user_modules"),
        (f"{A}rollout.name=sglang", "transformers and vllm", "transformers"),
        (f"{A}rollout.agent.default_agent_loop=tool_agnt", "no agent loop", "tool_agent?"),
        ("reward.reward_manager.name=gdpo", "not there yet", "naive"),
        (f"{A}rollout.checkpoint_engine.backend=nixl", "no such transport", "naive"),
        ("trainer.logger=[console,screen]", "no tracker of that name", "tensorboard"),
    ],
)
def test_names_of_nothing_are_refused(override, reason, fix):
    (problem,) = problems_of(override).values()
    assert problem.path == override.split("=")[0]
    assert reason in problem.reason
    assert fix in problem.fix


REGISTERS = """
from rlcore.algorithms import grpo, register_adv_est
from rlcore.trainer.base import PPOTrainer, register_trainer

@register_adv_est("{name}")
def mine(inputs):
    advantages = grpo(inputs.scores, inputs.groups, inputs.mask)
    return advantages, advantages

@register_trainer("{name}")
class Mine(PPOTrainer):
    pass

@register_adv_est("{name}_values", needs=("values",))
def of_values(inputs):
    return inputs.values, inputs.values

@register_adv_est("{name}_baselines", needs=("baselines",))
def of_baselines(inputs):
    raise AssertionError
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("user")
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(REGISTERS.format(name="of_test_names")))
    return path


def test_names_of_user_modules_are_looked_up_after_loading(module):
    config = load_config(
        "grpo-tiny",
        [
            f"trainer.user_modules=[{module}]",
            "algorithm.adv_estimator=of_test_names",
            "trainer.v1.trainer_mode=of_test_names",
        ],
    )
    assert config.algorithm.adv_estimator == "of_test_names"
    check_registered(config)
    assert "of_test_names" in registered_names("trainer.v1.trainer_mode")


@pytest.mark.parametrize(
    ("name", "reason"), [("values", "there is no critic"), ("baselines", "for remax only")]
)
def test_what_an_estimator_of_the_users_needs_has_to_be_made(module, name, reason):
    mine = [f"trainer.user_modules=[{module}]", f"algorithm.adv_estimator=of_test_names_{name}"]
    with pytest.raises(ConfigError, match=reason):
        check_registered(load_config("grpo-tiny", mine))
    if name == "values":
        check_registered(load_config("grpo-tiny", [*mine, "critic.enable=true"]))


def test_names_that_no_module_registers_are_listed_together(module):
    config = load_config(
        "grpo-tiny",
        [
            f"trainer.user_modules=[{module}]",
            "algorithm.adv_estimator=no_such_one",
            f"{LOSS}=gspo" if "gspo" in kind_of(LOSS).not_yet else f"{LOSS}=no_such_loss",
        ],
    )
    with pytest.raises(ConfigError, match="2 problems") as caught:
        check_registered(config)
    assert str(module) in str(caught.value)
    assert "algorithm.adv_estimator = no_such_one" in str(caught.value)


def test_names_of_the_list_of_agent_loops_are_looked_up_there(tmp_path):
    path = tmp_path / "agents.yaml"
    path.write_text("- {name: listed, _target_: rlcore.agent_loop.SingleTurnAgentLoop}\n")
    agent = f"{A}rollout.agent."
    overrides = [f"{agent}agent_loop_config_path={path}", f"{agent}default_agent_loop=listed"]
    check_registered(load_config("grpo-tiny", overrides))
    config = load_config("grpo-tiny", [*overrides, f"{agent}default_agent_loop=lost"])
    with pytest.raises(ConfigError, match="default_agent_loop = lost") as caught:
        check_registered(config)
    assert f"not by {path} either" in str(caught.value)
    assert "listed, " in str(caught.value)


def test_a_module_that_is_missing_is_named():
    config = load_config(
        "grpo-tiny", ["trainer.user_modules=[none.py]", "algorithm.adv_estimator=x"]
    )
    with pytest.raises(ConfigError, match=r"none\.py: no such Python file"):
        check_registered(config)
