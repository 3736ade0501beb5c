import asyncio

import pytest

from rlcore.agent_loop.session import SessionRunner
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.rewards import InlineRewards
from rlcore.testing.rollout import CountingReplica
from rlcore.testing.tiny_run import tiny_config


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
        **overrides,
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
            await runner.close()
            return result

        return spec, asyncio.run(run())

    return run_session
