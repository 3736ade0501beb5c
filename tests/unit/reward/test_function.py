import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.reward.function import Reward, check_result, compute_reward, load_reward_function
from rlcore.testing.tiny_run import tiny_config

FIELDS = {
    "data_source": "mine",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"index": 3},
}


def compute(function, fields=FIELDS):
    with ThreadPoolExecutor(1, thread_name_prefix="reward") as pool:
        return asyncio.run(compute_reward(function, "text", fields, pool))


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (0.5, Reward(score=0.5, extra={"acc": 0.5})),
        (1, Reward(score=1.0, extra={"acc": 1.0})),
        (True, Reward(score=1.0, extra={"acc": 1.0})),
        (np.float32(0.5), Reward(score=0.5, extra={"acc": 0.5})),
        ({"score": 2.0}, Reward(score=2.0, extra={})),
        ({"score": -1, "acc": 0, "note": "x"}, Reward(score=-1.0, extra={"acc": 0, "note": "x"})),
        ({"score": np.float64(0.25), "acc": np.bool_(True)},
         Reward(score=0.25, extra={"acc": True})),
    ],
)  # fmt: skip
def test_what_counts_as_a_reward(result, reward):
    assert check_result(result) == reward


@pytest.mark.parametrize(
    "result",
    [math.nan, math.inf, None, "1", [1.0], {"acc": 1.0}, {"score": None}, {"score": math.nan}],
)
def test_everything_else_is_an_error_never_a_zero(result):
    with pytest.raises(DataError, match="reward function"):
        check_result(result)


def test_a_sync_function_runs_in_a_thread_with_verls_arguments():
    def function(data_source, solution_str, ground_truth, extra_info):
        assert threading.current_thread().name.startswith("reward")
        assert (data_source, solution_str, ground_truth) == ("mine", "text", "4")
        return extra_info["index"]

    assert compute(function).score == 3.0


def test_an_async_function_runs_on_the_loop():
    async def function(**row):
        await asyncio.sleep(0)
        assert threading.current_thread() is threading.main_thread()
        return {"score": 1.0, "acc": 0.0}

    assert compute(partial(function)) == Reward(score=1.0, extra={"acc": 0.0})


def test_a_row_without_extra_info_gives_an_empty_mapping():
    fields = {**FIELDS, "extra_info": None}
    assert compute(lambda extra_info, **_: float(len(extra_info)), fields).score == 0.0


def test_reward_kwargs_are_bound_and_the_rules_are_the_default(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info, bonus=0):\n"
        "    return len(solution_str) + bonus\n"
    )
    config = tiny_config(
        tmp_path,
        {
            "reward.custom_reward_function.path": str(path),
            "reward.custom_reward_function.name": "mine",
            "reward.custom_reward_function.reward_kwargs": {"bonus": 10},
        },
    )
    assert compute(load_reward_function(config)).score == 14.0
    rule = load_reward_function(tiny_config(tmp_path))
    fields = {"data_source": "rollflow/letters", "reward_model": {"ground_truth": "et"}}
    assert compute(rule, fields).score == 0.75  # t, e and t of "text"
