import re

import pytest

from rlcore.agent_loop.check_env import check_environment, pieces
from rlcore.errors import ConfigError, RolloutError

TOOLS = {
    "actor_rollout_ref__rollout__agent__default_agent_loop": "tool_agent",
    "actor_rollout_ref__rollout__multi_turn__function_tool_path": "rlcore.tools.calculator",
    "data__max_prompt_length": 1000,
    "data__max_response_length": 400,
    "reward__num_workers": 1,
}


def test_made_up_calls_show_every_kind_of_token(make_config):
    report = check_environment(make_config(**TOOLS), num_prompts=2, num_sessions=3)
    assert report.num_failed == 0
    assert len(report.sessions) == 6
    assert "does not show tools" in report.notices[0]
    turns = {session.result.record.num_turns for session in report.sessions}
    assert len(turns) > 1
    texts = [
        piece
        for session in report.sessions
        for piece in pieces(report.tokenizer, session.result.rows[0])
    ]
    # Sums of two numbers, worked out by the real tool.
    calls = [text for mask, text in texts if mask == 1 and "<tool_call>" in text]
    answers = [text for mask, text in texts if mask == 0]
    a, b = map(int, re.search(r"(\d+) \+ (\d+)", calls[0]).groups())
    assert f"tool\n{a + b}<|im_end|>" in answers[0]
    assert all("compute_score" in session.result.record.metrics for session in report.sessions)


def test_a_policy_of_ones_own(make_config, tmp_path):
    path = tmp_path / "policy.py"
    path.write_text("def write(prompt, seed): return 'aeiou' if 'Vowels' in prompt else ''\n")
    report = check_environment(
        make_config(reward__num_workers=1), num_prompts=1, num_sessions=1, policy=f"{path}:write"
    )
    assert report.sessions[0].result.record.reward == 1.0


@pytest.mark.parametrize("policy", ["calls", "nonsense", "nofile.py:write"])
def test_a_wrong_policy_is_refused(make_config, policy):
    with pytest.raises(ConfigError, match=r"there are no tools|unknown policy|nofile\.py"):
        check_environment(make_config(), num_prompts=1, num_sessions=1, policy=policy)


def test_the_command_prints_prompt_tokens_reward_and_times(make_config, capsys, tmp_path):
    from flows.command.check_env import show_environment

    show_environment(make_config(**TOOLS), prompts=1, sessions=1, policy="random")
    text = capsys.readouterr().out
    assert "<|im_start|>user\nVowels" in text
    assert re.search(r"\d+ response tokens, \d+ sampled; 2 turns; reward", text)
    assert "compute_score" in text

    path = tmp_path / "bad.py"
    path.write_text("def compute_score(**row): raise ValueError('broken reward')\n")
    config = make_config(reward__custom_reward_function__path=str(path))
    with pytest.raises(RolloutError, match="1 of 1 sessions failed"):
        show_environment(config, prompts=1, sessions=1, policy="random")
    assert "broken reward" in capsys.readouterr().out
