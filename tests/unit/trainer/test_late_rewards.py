"""Complete batches scored by a reward model that shares the training devices."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from rlcore.agent_loop.session import SessionRunner
from rlcore.buffer.batches import check_session
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError, DataError, RewardError
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.ledger import good_session
from rlcore.testing.queue import MemoryQueue
from rlcore.testing.rollout import CountingReplica
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.base import PPOTrainer
from rlcore.trainer.late_rewards import LateScorer, with_stored_rewards
from rlcore.trainer.prompt_source import PromptSource
from rlcore.types import CallKey, SampledBatch

JUDGE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    if solution_str == "bad":
        raise ValueError("no verdict")
    assert reward_router_address == "here:1"
    return {"score": float(len(solution_str)), "phase": extra_info["phase"],
            "paid": extra_info["environment_reward"], "turns": extra_info["num_turns"],
            "index": extra_info["index"]}
"""
INPUTS = {"environment_reward": 0.25}
KEY = CallKey(run_id="r", attempt=1, global_step=2, phase="compute_reward")


class Model:
    """Records when it is awake."""

    address = "here:1"

    def __init__(self):
        self.calls = []

    def wake_up(self, key):
        self.calls.append(("wake_up", key.phase))

    def sleep(self, key):
        self.calls.append(("sleep", key.phase))


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    return tmp_path_factory.mktemp("late")


@pytest.fixture
def config(tiny_root, tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(JUDGE)
    return tiny_config(
        tiny_root,
        {
            "reward.custom_reward_function.path": str(path),
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": str(tiny_root / "models" / "tiny"),
            "reward.num_workers": 1,
        },
    )


def batch_of(texts, tokenizer):
    """Two rows of one session and one of another; then one that is scored already."""
    queue = MemoryQueue()
    keys = ["train-0-3-ab_0_0", "train-0-3-ab_0_1", "train-0-3-ab_1_0", "train-0-4-ab_0_0"]
    tags = []
    for key, text in zip(keys, texts, strict=True):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"] + [2, 9])
        mask = torch.tensor([1] * (len(ids) - 1) + [0])  # a tool token stands at the end
        queue.put("r/train", [key], {
            "responses": [ids], "response_mask": [mask], "rm_scores": [torch.zeros(len(ids))],
        })  # fmt: skip
        uid, session, _ = key.split("_")
        is_scored = uid == "train-0-4-ab"
        tags.append(
            {"uid": uid, "session_id": int(session), "num_turns": 4, "response_len": len(ids),
             "reward": 0.5 if is_scored else None,
             "reward_extra": {"acc": 1.0} if is_scored
             else {**INPUTS, "num_sampled_tokens": len(ids) - 1}}
        )  # fmt: skip
    batch = SampledBatch(
        lease_id="l", global_step=2, inner_step=0, uids=["train-0-3-ab", "train-0-4-ab"],
        keys=keys, tags=tags, metrics={},
    )  # fmt: skip
    return queue, batch


def test_a_batch_is_scored_by_last_trajectories_and_rows_keep_it(config):
    prompts, model = PromptSource(config, "r"), Model()
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    queue, batch = batch_of(["first", "two", "seven!!", "done"], tokenizer)
    scorer = LateScorer(config, prompts, queue, model, KEY)
    scored = scorer.score_batch("r/train", batch)
    # A reward function sees the tool token's text too.
    extra = len(tokenizer.decode([9]))
    assert [tag["reward"] for tag in scored.tags] == [3 + extra, 3 + extra, 7 + extra, 0.5]
    assert scored.tags[0]["reward_extra"] == {
        "phase": "train", "paid": 0.25, "turns": 4, "index": 3,
    }  # fmt: skip
    assert model.calls == [("wake_up", "compute_reward"), ("sleep", "compute_reward")]
    row = queue.rows["r/train", "train-0-3-ab_1_0"]["rm_scores"]
    assert row.tolist() == [0.0] * 7 + [7.0 + extra, 0.0]
    # Later phases read the ledger's batch, which knows no rewards.
    again = with_stored_rewards(queue, "r/train", batch)
    assert [tag["reward"] for tag in again.tags] == [tag["reward"] for tag in scored.tags]
    # A phase that is run again scores again, to the same end.
    assert scorer.score_batch("r/train", batch) == scored
    assert with_stored_rewards(queue, "r/train", scored) is scored


def test_what_cannot_be_scored_ends_the_phase_with_its_row_and_the_model_sleeps(config):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    queue, batch = batch_of(["a", "b", "bad", "done"], tokenizer)
    for key in ("train-0-3-ab_1_0",):  # without the tool token the text is the judge's cue
        row = queue.rows["r/train", key]
        queue.rows["r/train", key] = {name: value[:-1] for name, value in row.items()}
    model = Model()
    scorer = LateScorer(config, PromptSource(config, "r"), queue, model, KEY)
    with pytest.raises(RewardError, match=r"train.parquet row 3, session 1: [\s\S]*no verdict"):
        scorer.score_batch("r/train", batch)
    assert model.calls[-1] == ("sleep", "compute_reward")


def test_a_function_that_cannot_be_loaded_wakes_nothing_up(config, tmp_path):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    queue, batch = batch_of(["a", "b", "c", "done"], tokenizer)
    (tmp_path / "broken.py").write_text("raise OSError('no rules file')")
    reward = config.reward.custom_reward_function
    broken = reward.model_copy(update={"path": str(tmp_path / "broken.py")})
    section = config.reward.model_copy(update={"custom_reward_function": broken})
    model = Model()
    prompts = PromptSource(config, "r")
    scorer = LateScorer(config.model_copy(update={"reward": section}), prompts, queue, model, KEY)
    with pytest.raises(ConfigError, match="no rules file"):
        scorer.score_batch("r/train", batch)
    assert model.calls == []


def test_sessions_of_a_validation_are_scored_or_have_failed(config):
    prompts = PromptSource(config, "r")
    specs = prompts.val_specs(global_step=2)[:2]
    first, second = (spec.uid for spec in specs)
    unscored = {
        "reward": None,
        "reward_extra": {"environment_reward": 1.0, "num_sampled_tokens": 5},
        "is_unscored": True,
    }
    settled = {
        first: [good_session(first, 0, **unscored), good_session(first, 1, **unscored)],
        second: [good_session(second, 0)],
    }
    texts = {f"{first}_0_0": "four", f"{first}_1_0": "bad", f"{second}_0_0": "scored"}
    scorer = LateScorer(config, prompts, MemoryQueue(), Model(), KEY)
    scored = scorer.score_settled(specs, settled, texts)
    good, bad = scored[first]
    assert (good.reward, good.reward_extra["phase"], good.is_unscored) == (4.0, "validate", False)
    assert (bad.reward, bad.error_type, bad.is_failed) == (None, "RewardError", True)
    assert "no verdict" in bad.error_message
    assert scored[second] == settled[second]


def test_workers_leave_sessions_unscored(config):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    [spec] = PromptSource(config, "r").train_specs(start=0, count=1, global_step=1)
    client = LLMServerClient(Router({"replica": CountingReplica(num_tokens=5)}), seed=0)

    async def run():
        runner = SessionRunner(config, client, tokenizer, None, [2])
        await runner.start()
        result = await runner.run(spec, 0)
        await runner.close()
        return result

    result = asyncio.run(run())
    assert result.record.error_message == ""
    assert (result.record.reward, result.record.is_unscored) == (None, True)
    assert result.rows[0]["rm_scores"].tolist() == [0.0] * 5
    check_session(spec.uid, result.record)
    with pytest.raises(DataError, match="no finite reward"):
        check_session(spec.uid, good_session(spec.uid, 0, reward=None))


def test_parts_of_a_reward_need_a_pool(tiny_root):
    named = {
        "algorithm.adv_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": ["a", "b"],
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "x",
    }
    with pytest.raises(ConfigError, match=r"(?s)gdpo_reward_keys.*complete batches"):
        tiny_config(tiny_root, named)
    tiny_config(
        tiny_root,
        {**named, "reward.reward_model.enable_resource_pool": True,
         "reward.reward_model.nnodes": 1},
    )  # fmt: skip


def test_a_trainer_scores_late_only_where_it_must(config):
    bare = object.__new__(PPOTrainer)
    bare.config, bare.reward_model, bare.call_key = config, None, KEY
    assert bare._late_scorer() is None
    bare.reward_model, bare.prompts = Model(), SimpleNamespace()
    assert isinstance(bare._late_scorer(), LateScorer)
