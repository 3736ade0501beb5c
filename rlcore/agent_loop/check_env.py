"""A few sessions of a preset with a policy that costs nothing: what the trainer would see."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.choice import AgentLoopChooser
from rlcore.agent_loop.rows import Row
from rlcore.agent_loop.session import SessionResult, SessionRunner
from rlcore.config import RunConfig
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer, stop_token_ids
from rlcore.errors import ConfigError
from rlcore.reward.loop import RewardLoopManager
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.scripted_replica import ScriptedReplica
from rlcore.tools.toolbox import Toolbox
from rlcore.user_code import load_user_modules, load_user_object

Policy = Callable[[str, int], str]
"""(the text so far, a random seed) -> what the model writes in this turn."""

CALL_SHARE = 0.6
RANDOM_WORDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReport:
    """One session and how long it took."""

    origin: str
    result: SessionResult
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    """What `check_environment` found."""

    notices: list[str]
    sessions: list[SessionReport]
    tokenizer: PreTrainedTokenizerBase

    @property
    def num_failed(self) -> int:
        """Sessions that ended with an error."""
        return sum(session.result.record.is_failed for session in self.sessions)


def check_environment(
    config: RunConfig, *, num_prompts: int, num_sessions: int, policy: str | None = None
) -> EnvironmentReport:
    """Run sessions of the first training prompts with a policy in place of the model.

    Args:
        config: Of the run.
        num_prompts: Prompts to take.
        num_sessions: Sessions of each.
        policy: `random`: words; `calls`: calls of tools with made-up arguments, then an answer;
            `FILE.py:FUNCTION`: yours, see `Policy`. None: calls where there are tools.

    Raises:
        ConfigError: a user module, the policy, tools, rewards or agent loop cannot be used.
        DataError: model folder or data are wrong.
    """
    load_user_modules(config.trainer.user_modules)
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    stop_ids = stop_token_ids(model.path, tokenizer)
    write = _policy(policy, Toolbox(config).schemas)
    replica = ScriptedReplica(tokenizer, write, end_token_id=stop_ids[0])
    client = LLMServerClient(Router({"policy": replica}), config.rollout_seed)
    runner = SessionRunner(config, client, tokenizer, RewardLoopManager(config), stop_ids)
    dataset = load_dataset(config, "train", tokenizer)
    order = PromptOrder(num_rows=len(dataset), batch_size=1, shuffle=False, seed=0)
    specs = make_specs(
        dataset,
        order,
        start=0,
        count=min(num_prompts, len(dataset)),
        run_id="check-env",
        partition_id="check-env/train",
        global_step=1,
        num_sessions=num_sessions,
    )

    async def run() -> list[SessionReport]:
        await runner.start()
        try:
            reports: list[SessionReport] = []
            for spec in specs:
                for session_id in range(num_sessions):
                    started = time.monotonic()
                    result = await runner.run(spec, session_id)
                    reports.append(
                        SessionReport(
                            origin=spec.fields["origin"],
                            result=result,
                            total_s=time.monotonic() - started,
                        )
                    )
            return reports
        finally:
            await runner.close()

    agent = config.actor_rollout_ref.rollout.agent
    chooser = AgentLoopChooser(agent.default_agent_loop, agent.agent_loop_config_path)
    notices = chooser.choose(None).loop_class.check_at_start(config, tokenizer)
    return EnvironmentReport(notices=notices, sessions=asyncio.run(run()), tokenizer=tokenizer)


def pieces(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[tuple[int, str]]:
    """Return the response in pieces of equal mask: (mask, text)."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(row["responses"].tolist(), row["response_mask"].tolist(), strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, str(tokenizer.decode(ids))) for mask, ids in found]


def _policy(name: str | None, schemas: list[dict[str, Any]]) -> Policy:
    if name is None:
        name = "calls" if schemas else "random"
    if name == "random":
        return _write_words
    if name == "calls":
        if not schemas:
            raise ConfigError("policy calls: there are no tools (multi_turn.function_tool_path)")
        return lambda _, seed: _write_call(schemas, seed)
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(f"unknown policy {name!r}: random, calls or FILE.py:FUNCTION")
    return load_user_object(path, function)


def _write_words(_: str, seed: int) -> str:
    source = random.Random(seed)
    words = ("the", "answer", "is", "not", "7", "42", "-3", "yes", "no", "maybe")
    return " ".join(source.choice(words) for _ in range(RANDOM_WORDS))


def _write_call(schemas: list[dict[str, Any]], seed: int) -> str:
    source = random.Random(seed)
    if source.random() > CALL_SHARE:
        return f"The answer is {source.randrange(100)}."
    function = source.choice(schemas)["function"]
    properties: Mapping[str, Any] = function["parameters"].get("properties", {})
    arguments = {name: _made_up(schema, source) for name, schema in properties.items()}
    body = json.dumps({"name": function["name"], "arguments": arguments})
    return f"I call a tool.\n<tool_call>\n{body}\n</tool_call>"


def _made_up(schema: Mapping[str, Any], source: random.Random) -> Any:
    match schema.get("type"):
        case "integer":
            return source.randrange(100)
        case "number":
            return source.random()
        case "boolean":
            return source.random() < 0.5
        case "array":
            return []
        case "object":
            return {}
        case _:
            return f"{source.randrange(100)} + {source.randrange(100)}"
