import asyncio
import time

import pytest

from rlcore.config import load_config
from rlcore.errors import ConfigError, RewardError
from rlcore.reward.function import Reward
from rlcore.reward.loop import RewardLoopManager
from rlcore.reward.managers import (
    DapoRewardManager,
    NaiveRewardManager,
    Pace,
    RateLimitedRewardManager,
)

BUFFER = {
    "reward__reward_manager__name": "dapo",
    "reward__reward_kwargs__overlong_buffer_cfg": {
        "enable": True, "len": 4, "penalty_factor": 0.5, "log": True,
    },
    "data__max_response_length": 10,
}  # fmt: skip


def run(manager, task, score=None):
    async def one(_):
        return Reward(score=1.0, extra={"acc": 1.0})

    return asyncio.run(manager.run(task, score or one))


def test_naive_passes_the_score_on(make_config, make_task):
    reward = run(NaiveRewardManager(make_config()), make_task())
    assert reward == Reward(score=1.0, extra={"acc": 1.0})


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # The buffer are tokens 7 to 10 of at most 10: -(tokens - 6) / 4 * 0.5, and no more beyond.
    [(1, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5), (30, -0.5)],
)
def test_dapo_punishes_what_reaches_into_the_buffer(make_config, make_task, num_tokens, penalty):
    reward = run(DapoRewardManager(make_config(**BUFFER)), make_task(num_tokens=num_tokens))
    assert reward.score == pytest.approx(1 + penalty)
    assert reward.extra == {
        "acc": 1.0,
        "overlong_reward": pytest.approx(penalty),
        "overlong": float(penalty < 0),
    }


def test_the_pace_is_even():
    now = 100.0
    pace = Pace(120, clock=lambda: now)
    assert [pace.reserve() for _ in range(3)] == [0, 0.5, 1.0]
    assert pace.reserve(4) == 1.5
    assert pace.reserve() == 3.5
    now = 200.0
    assert pace.reserve() == 0


def test_a_limited_judge_is_asked_at_its_rate_and_its_outage_is_an_error(make_config, make_task):
    config = make_config(reward__reward_manager__name="rate_limited", reward__max_rpm=600)
    manager = RateLimitedRewardManager(config)
    times = []

    async def outage(_):
        times.append(time.monotonic())
        raise RewardError("429 Too Many Requests")

    async def all_of_them():
        return await asyncio.gather(
            *(manager.run(make_task(), outage) for _ in range(4)), return_exceptions=True
        )

    outcome = asyncio.run(all_of_them())
    assert [str(error) for error in outcome] == ["429 Too Many Requests"] * 4
    assert times[-1] - times[0] >= 0.29  # 10 a second


def test_tokens_are_counted_too(make_config):
    config = make_config(
        reward__reward_manager__name="limited",
        reward__max_tpm=60_000,
        reward__estimated_tokens_per_request=500,
    )
    manager = RateLimitedRewardManager(config)
    [(pace, amount)] = manager._paces
    assert amount == 500
    assert pace.reserve(amount) == 0
    assert pace.reserve(amount) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("later", "per_minute"),
    # Four workers share the limit; batches that are scored when complete have one manager.
    [(False, 150), (True, 600)],
)
def test_a_limit_is_that_of_the_run(make_config, later, per_minute):
    config = make_config(
        reward__reward_manager__name="rate_limited",
        reward__max_rpm=600,
        reward__max_concurrent=8,
        reward__reward_model__enable=later,
        reward__reward_model__model_path="models/tiny",
        actor_rollout_ref__rollout__agent__num_workers=4,
    )
    [(pace, _)] = RateLimitedRewardManager(config)._paces
    assert pace._seconds_each == pytest.approx(60 / per_minute)
    manager = RewardLoopManager(config, "127.0.0.1:1")
    assert manager._pool._num_processes == 8 * per_minute // 600


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.max_rpm=10"], "no effect with reward.reward_manager.name=naive"),
        (["reward.reward_kwargs.overlong_buffer_cfg.enable=true"], "reward_manager.name=dapo"),
        (["reward.reward_manager.name=dapo",
          "reward.reward_kwargs.overlong_buffer_cfg.enable=true"],
         "0 < len <= 8"),
        (["reward.functions=[{name:a},{name:a}]"], "the name a is given twice"),
        (["reward.functions=[{name:acc}]"], "the name acc is reserved"),
        (["reward.functions=[{name:a}]", "reward.custom_reward_function.path=x.py"],
         "no effect beside reward.functions"),
        (["reward.reward_manager.name=batch"], "reward_manager.name"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("grpo-tiny", overrides)
