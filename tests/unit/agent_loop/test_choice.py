import pytest

from rlcore.agent_loop import SingleTurnAgentLoop
from rlcore.agent_loop.choice import AgentLoopChooser, read_agent_loops
from rlcore.errors import ConfigError

LOOP = """
from rlcore.agent_loop import AgentLoopBase, AgentLoopOutput

class Mine(AgentLoopBase):
    def __init__(self, *args, depth=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.depth = depth
        self.runs = 0

    async def run(self, sampling_params, **row):
        self.runs += 1
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=[70 + self.depth, 70 + self.runs], response_mask=[1, 1],
            response_logprobs=[0.0, 0.0], weight_versions=[0, 0], reward_score=1.0,
        )

class NoLoop: ...
"""


@pytest.fixture
def write_list(tmp_path):
    (tmp_path / "mine.py").write_text(LOOP)

    def write_list(text):
        path = tmp_path / "agents.yaml"
        path.write_text(text)
        return str(path)

    return write_list


def test_an_entry_names_class_and_arguments(write_list, run_session):
    path = write_list("- {name: deep, _target_: mine.Mine, depth: 5}\n")
    for session_id in range(2):
        _, result = run_session(
            session_id=session_id,
            fields={"agent_name": "deep"},
            actor_rollout_ref__rollout__agent__agent_loop_config_path=path,
        )
        # One instance per session: `runs` is 1 in each.
        assert result.rows[0]["responses"].tolist() == [75, 71]


def test_the_default_and_installed_modules(write_list):
    path = write_list("- {name: one, _target_: rlcore.agent_loop.SingleTurnAgentLoop}\n")
    chooser = AgentLoopChooser("one", path)
    assert chooser.choose(None).loop_class is SingleTurnAgentLoop
    assert chooser.choose("single_turn_agent").loop_class is SingleTurnAgentLoop
    known = r"unknown agent loop 'two'; known: .*one, openai_agent, single_turn_agent"
    with pytest.raises(ConfigError, match=known):
        chooser.choose("two")
    with pytest.raises(ConfigError, match="unknown agent loop 'two'"):
        AgentLoopChooser("two", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\n", "must be a list"),
        ("- {name: a}\n", "entry 0: needs name and _target_"),
        ("- {name: a, _target_: mine.Mine}\n- {name: a, _target_: mine.Mine}\n", "there twice"),
        ("- {name: a, _target_: mine.NoLoop}\n", "no subclass of AgentLoopBase"),
        ("- {name: a, _target_: mine.Nothing}\n", "defines no 'Nothing'; it defines"),
        ("- {name: a, _target_: no_such_module.X}\n", "No module named 'no_such_module'"),
        ("- {name: a, _target_: Bare}\n", "_target_ Bare"),
        ("- [\n", "agent_loop_config_path"),
    ],
)
def test_a_wrong_list_is_named(write_list, text, message):
    with pytest.raises(ConfigError, match=message):
        read_agent_loops(write_list(text))


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no_list\.yaml"):
        read_agent_loops(str(tmp_path / "no_list.yaml"))


SEED = """
import uuid
from typing import Any
from rlcore.agent_loop import AgentLoopBase, AgentLoopOutput, register

@register("seed_agent")
class SeedAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(messages)
        out = await self.server_manager.generate(
            request_id=uuid, prompt_ids=prompt_ids, sampling_params=sampling_params,
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=out.token_ids,
            response_mask=[1] * len(out.token_ids),
            num_turns=2,
        )
"""


def test_a_loop_written_for_verl_works_with_its_import_lines_changed(tmp_path, run_session):
    (tmp_path / "seed_loop.py").write_text(SEED)
    path = tmp_path / "agents.yaml"
    path.write_text("- name: seed_agent\n  _target_: seed_loop.SeedAgentLoop\n")
    _, result = run_session(
        actor_rollout_ref__rollout__agent__agent_loop_config_path=str(path),
        actor_rollout_ref__rollout__agent__default_agent_loop="seed_agent",
    )
    assert result.record.error_message == ""
    assert len(result.rows[0]["responses"]) == 8
