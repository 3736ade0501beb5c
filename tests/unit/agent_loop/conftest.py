import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest

from rlcore.agent_loop.endpoint.server import Access, Endpoint
from rlcore.agent_loop.session import SessionRunner
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.rewards import InlineRewards
from rlcore.testing.rollout import CountingReplica
from rlcore.testing.scripted_replica import TypingReplica, texts_by_mask
from rlcore.testing.tiny_run import tiny_config
from rlcore.types import AgentLoopOutput


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny_config(root)
    return root


@pytest.fixture
def make_config(tiny_root):
    """Return the tiny preset with overrides."""
    return lambda **overrides: tiny_config(
        tiny_root, {key.replace("__", "."): value for key, value in overrides.items()}
    )


@pytest.fixture
def run_session(make_config):
    def run_session(
        replica=None, session_id=0, fields=None, validate=False, reward=None, router=None,
        after=None, **overrides,
    ):  # fmt: skip
        config = make_config(**overrides)
        dataset = load_dataset(config, "train")
        [spec] = make_specs(
            dataset,
            PromptOrder(num_rows=len(dataset), batch_size=4, shuffle=False, seed=0),
            start=5, count=1, run_id="run", partition_id="run/train", global_step=3,
            num_sessions=4, validate=validate,
        )  # fmt: skip
        spec.fields.update(fields or {})
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        router = router or Router(
            {"replica-0": replica or CountingReplica()}, empty_deadline_s=0.05
        )
        client = LLMServerClient(router, seed=0)
        rewards = InlineRewards(reward) if reward else InlineRewards.from_config(config)
        runner = SessionRunner(config, client, tokenizer, rewards, [2])

        async def run():
            result = await runner.run(spec, session_id)
            if after is not None:
                await after()
            await runner.close()
            return result

        return spec, asyncio.run(run())

    return run_session


@dataclass
class Talk:
    """What a conversation with the endpoint left behind."""

    result: Any
    outputs: list[AgentLoopOutput]
    replica: TypingReplica
    tokenizer: Any
    access: Access

    def pieces(self, index=-1):
        """Return a trajectory's response as (mask, text)."""
        output = self.outputs[index]
        columns = {"responses": output.response_ids, "response_mask": output.response_mask}
        row = {name: np.array(values) for name, values in columns.items()}
        return texts_by_mask(self.tokenizer, row)

    def prompt(self, index=-1):
        return self.tokenizer.decode(self.outputs[index].prompt_ids)


@pytest.fixture
def talk(make_config):
    """Run `agent(client, access)` with the real client against an endpoint whose model `write`s.

    `write` is a text, a list of turns, or a function of (text so far, seed). While it runs, the
    replica is `talk.replica`.
    """

    def talk(
        agent, write, *, token_s=0.0, api_key=None, greedy=False, replicas=None, tokenizer=None,
        sync=False, **overrides,
    ):  # fmt: skip
        config = make_config(
            data__max_prompt_length=overrides.pop("max_prompt", 1000),
            data__max_response_length=overrides.pop("max_response", 1000),
            **overrides,
        )
        tokenizer = tokenizer or load_tokenizer(config.actor_rollout_ref.model.path)
        turns = iter(write) if isinstance(write, list) else None
        replica = TypingReplica(
            tokenizer,
            write if callable(write) else lambda *_: write if turns is None else next(turns),
            end_token_id=2, version=3, token_s=token_s,
        )  # fmt: skip
        talk.replica = replica
        members = {"replica-0": replica} if replicas is None else replicas
        client = LLMServerClient(Router(members, empty_deadline_s=0.05), seed=0)

        async def run():
            endpoint = Endpoint(config, tokenizer)
            server = client.for_session(
                "train/0/1", 0, max_tokens=config.data.max_response_length,
                max_model_len=config.max_model_len,
            )  # fmt: skip
            params = {
                "temperature": 0.7, "top_p": 1.0, "top_k": -1, "do_sample": not greedy,
                "stop_token_ids": [2],
            }  # fmt: skip
            try:
                async with endpoint.session(server, params) as (session, access):
                    kwargs = {
                        "base_url": access.base_url,
                        "api_key": api_key or access.api_key,
                        "max_retries": 0,
                    }
                    async with asyncio.timeout(60):
                        if sync:
                            with openai.OpenAI(**kwargs) as asked:
                                result = await asyncio.to_thread(agent, asked, access)
                        else:
                            async with openai.AsyncOpenAI(**kwargs) as asked:
                                result = await agent(asked, access)
                    outputs = session.trajectories()
            finally:
                await endpoint.close()
            return Talk(result, outputs, replica, tokenizer, access)

        return asyncio.run(run())

    return talk
