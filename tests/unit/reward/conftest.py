import asyncio
import textwrap

import pytest

from rlcore.reward.function import RewardTask
from rlcore.reward.loop import RewardLoopManager
from rlcore.testing.tiny_run import tiny_config


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny_config(root)
    return root


@pytest.fixture
def make_config(tiny_root, tmp_path):
    """Return the tiny preset with overrides; `code` is the file of the custom reward function."""

    def make_config(code=None, **overrides):
        values = {key.replace("__", "."): value for key, value in overrides.items()}
        if code is not None:
            path = tmp_path / "my_reward.py"
            path.write_text(textwrap.dedent(code))
            values["reward.custom_reward_function.path"] = str(path)
        return tiny_config(tiny_root, values)

    return make_config


@pytest.fixture
def make_task():
    def make_task(text="text", **changes):
        values = {
            "data_source": "mine",
            "solution_str": text,
            "ground_truth": "4",
            "extra_info": {"index": 3},
            "num_tokens": 4,
        }
        return RewardTask(**{**values, **changes})

    return make_task


@pytest.fixture
def score_all():
    """Score tasks at the same time; errors are returned in their places."""

    def score_all(config, tasks, manager=None):
        async def run():
            rewards = manager or RewardLoopManager(config)
            await rewards.start()
            try:
                async with asyncio.timeout(60):
                    return await asyncio.gather(
                        *(rewards.score(task) for task in tasks), return_exceptions=True
                    )
            finally:
                await rewards.close()

        return asyncio.run(run())

    return score_all
