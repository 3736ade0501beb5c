import math

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.reward.function import Reward, check_result, load_reward_function, uses_rules


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


def test_a_function_gets_verls_arguments_and_may_be_async_or_named(
    make_config, make_task, score_all
):
    code = """
    import asyncio, threading

    class Judge:
        async def __call__(self, data_source, solution_str, ground_truth, extra_info, bonus=0):
            await asyncio.sleep(0)
            assert threading.current_thread() is threading.main_thread()
            assert (data_source, solution_str, ground_truth) == ("mine", "text", "4")
            return {"score": extra_info["index"] + bonus, "acc": 0.0}

    judge = Judge()
    """
    config = make_config(
        code,
        reward__custom_reward_function__name="judge",
        reward__custom_reward_function__reward_kwargs={"bonus": 10},
        reward__num_workers=1,
    )
    assert score_all(config, [make_task()]) == [Reward(score=13.0, extra={"acc": 0.0})]


def test_the_rules_are_the_default(make_config):
    rule = load_reward_function(make_config())
    result = rule(
        data_source="rollflow/letters", solution_str="text", ground_truth="et", extra_info={}
    )
    assert result["score"] == 0.75  # t, e and t of "text"


NAMED = """
def length(data_source, solution_str, ground_truth, extra_info, target):
    return {"score": -abs(len(solution_str) - target), "length": len(solution_str)}

async def phase(data_source, solution_str, ground_truth, extra_info):
    return float("nan") if solution_str == "bad" else extra_info["phase"] == "train"
"""


def test_named_rewards_are_added_up_and_kept_apart(make_config, tmp_path, make_task, score_all):
    path = tmp_path / "parts.py"
    path.write_text(NAMED)
    config = make_config(
        reward__functions=[
            {"name": "letters"},
            {"name": "brief", "weight": 0.1, "path": str(path), "function": "length",
             "reward_kwargs": {"target": 6}},
            {"name": "phase", "weight": 2, "path": str(path), "function": "phase"},
        ],
        reward__num_workers=1,
    )  # fmt: skip
    fields = {"data_source": "rollflow/letters", "ground_truth": "et"}
    task = make_task("text", extra_info={"phase": "train"}, **fields)
    bad = make_task("bad", extra_info={"phase": "train"}, **fields)
    reward, error = score_all(config, [task, bad])
    assert reward.score == pytest.approx(0.75 + 0.1 * -2 + 2 * 1)
    assert reward.extra == {
        "letters": 0.75, "acc": 1.0, "brief": -2.0, "brief_length": 4, "phase": 1.0,
    }  # fmt: skip
    assert "reward phase: the reward function's result must be a finite number" in str(error)


def test_whether_rules_score(make_config):
    part = {"name": "a", "path": __file__, "function": "test_whether_rules_score"}
    assert uses_rules(make_config())
    assert uses_rules(make_config(reward__functions=[part, {"name": "b"}]))
    assert not uses_rules(make_config(reward__functions=[part]))
    assert not uses_rules(make_config("def compute_score(**row): return 0.0"))
