import asyncio
import json
import shutil
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop import AgentLoopBase, register
from rlcore.agent_loop.session import SessionResult, with_baseline
from rlcore.errors import ActorUnavailableError, NoReplicaError
from rlcore.rollout.router import Router
from rlcore.testing.rollout import CountingReplica
from rlcore.testing.scripted_replica import ScriptedReplica
from rlcore.testing.tiny_model import CHAT_TEMPLATE, END
from rlcore.types import AgentLoopOutput, SessionRecord


@register("test_two_turns")
class TwoTurns(AgentLoopBase):
    """Asks, adds tool tokens, asks again; stores both turns and the first one alone."""

    async def run(self, sampling_params, **row):
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        first = await self.server_manager.generate(
            "a", prompt_ids, {**sampling_params, "max_tokens": 3}
        )
        tool = self.tokenizer("ok", add_special_tokens=False)["input_ids"]
        context = [*prompt_ids, *first.token_ids, *tool]
        second = await self.server_manager.generate(
            "b", context, {**sampling_params, "max_tokens": 2}
        )
        return [
            AgentLoopOutput(
                prompt_ids=prompt_ids, response_ids=first.token_ids, response_mask=[1] * 3
            ),
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=[*first.token_ids, *tool, *second.token_ids],
                response_mask=[1, 1, 1, 0, 0, 1, 1],
                num_turns=4,
                metrics={"tool_calls": 0.5},
            ),
        ]


@register("test_bad_loop")
class BadLoop(AgentLoopBase):
    """Fails in the way its row asks for."""

    async def run(self, sampling_params, **row):
        match row["extra_info"]["fault"]:
            case "raise":
                raise ZeroDivisionError("tool broke")
            case "bad metrics":
                return AgentLoopOutput(
                    prompt_ids=[1], response_ids=[70], response_mask=[1], response_logprobs=[0.0],
                    weight_versions=[0], metrics={"tool": "slow"},
                )  # fmt: skip
            case "nothing":
                return []
            case "none":
                return None
            case "hang":
                await asyncio.sleep(60)
            case "own timeout":
                async with asyncio.timeout(0):
                    await asyncio.sleep(1)
        raise AssertionError("unknown fault")


def vowel_share(ids):
    # The tiny tokenizer: four special tokens, newline, then printable ASCII from 32.
    text = [chr(i - 5 + 32) for i in ids if i >= 5]
    return sum(character in "aeiou" for character in text) / len(text)


def test_a_single_turn_is_scored_and_stored(run_session):
    # ids 70..75 are "a".."f" of which a and e are vowels.
    replica = CountingReplica(num_tokens=5, first_token=70, num_choices=6, version=3)
    spec, result = run_session(replica, session_id=2)
    [row] = result.rows
    record = result.record
    tokens = row["responses"].tolist()
    assert record.keys == [f"{spec.uid}_2_0"]
    assert tokens[-1] == 2  # the end-of-sequence token belongs to the response
    assert record.reward == pytest.approx(vowel_share(tokens[:-1]))
    assert record.reward_extra == {"acc": float(record.reward >= 0.5)}
    assert row["rm_scores"].tolist() == pytest.approx([0, 0, 0, 0, record.reward])
    assert row["rollout_log_probs"].tolist()[:4] == pytest.approx([-t / 100 for t in tokens[:-1]])
    assert row["weight_versions"].tolist() == [3] * 5
    assert record.tags[0]["global_steps"] == 3
    assert (record.num_turns, record.error_type) == (2, "")


def test_sessions_of_a_prompt_differ_and_repeat(run_session):
    def tokens(session_id):
        return run_session(session_id=session_id)[1].rows[0]["responses"].tolist()

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)


def test_training_samples_and_validation_is_greedy(run_session):
    train, val = CountingReplica(), CountingReplica()
    run_session(train, actor_rollout_ref__rollout__temperature=0.7)
    run_session(val, validate=True)
    sampled, greedy = train.requests[0][2], val.requests[0][2]
    assert (sampled["temperature"], sampled["do_sample"]) == (0.7, True)
    assert (greedy["temperature"], greedy["do_sample"]) == (0.0, False)
    assert sampled["stop_token_ids"] == [2]
    assert sampled["max_tokens"] == 8


def test_all_trajectories_of_a_session_get_the_score_of_the_last(run_session):
    seen = []

    def reward(solution_str, **row):
        seen.append(solution_str)
        return {"score": 0.5, "note": "x"}

    spec, result = run_session(fields={"agent_name": "test_two_turns"}, reward=reward)
    short, whole = result.rows
    assert result.record.keys == [f"{spec.uid}_0_0", f"{spec.uid}_0_1"]
    assert len(seen) == 1
    assert "ok" in seen[0]
    assert short["rm_scores"].tolist() == [0, 0, 0.5]
    assert whole["rm_scores"].tolist() == [0, 0, 0, 0, 0, 0, 0.5]
    assert whole["weight_versions"].tolist() == [0, 0, 0, -1, -1, 0, 0]
    assert whole["rollout_log_probs"].tolist()[3:5] == [0, 0]
    assert (result.record.num_turns, result.record.metrics["tool_calls"]) == (4, 0.5)
    assert result.record.reward_extra == {"note": "x"}


def test_a_raising_reward_function_fails_the_session_with_row_and_traceback(run_session):
    def reward(**row):
        return {}["missing"]

    spec, result = run_session(reward=reward)
    record = result.record
    assert (record.error_type, record.reward, record.keys, result.rows) == (
        "KeyError",
        None,
        [],
        [],
    )
    assert record.error_message.startswith(f"{spec.fields['origin']} (uid {spec.uid}), session 0: ")
    assert 'return {}["missing"]' in record.error_message
    assert record.error_message.endswith("KeyError: 'missing'")


def test_a_reward_that_is_not_a_number_fails_the_session(run_session):
    _, result = run_session(reward=lambda **row: float("nan"))
    assert result.record.error_type == "DataError"
    assert "must be a finite number, is float nan" in result.record.error_message


@pytest.mark.parametrize(
    ("fault", "error_type", "message"),
    [
        ("raise", "ZeroDivisionError", "tool broke"),
        ("bad metrics", "ValueError", "could not convert string to float: 'slow'"),
        ("nothing", "ValueError", "returned an empty list"),
        ("none", "DataError", "must return AgentLoopOutput"),
        ("hang", "TimeoutError", "not finished after deadlines.session=0.2 s; 0 turns"),
        ("own timeout", "TimeoutError", "async with asyncio.timeout"),
    ],
)
def test_a_failed_session_is_data(run_session, fault, error_type, message):
    fields = {"agent_name": "test_bad_loop", "extra_info": {"fault": fault}}
    _, result = run_session(fields=fields, deadlines__session=0.2)
    assert result.record.error_type == error_type
    assert message in result.record.error_message
    assert result.rows == []


def test_an_unknown_agent_loop_is_named(run_session):
    _, result = run_session(fields={"agent_name": "no_such_loop"})
    assert "unknown agent loop 'no_such_loop'; known: " in result.record.error_message
    assert "single_turn_agent" in result.record.error_message


def test_a_missing_replica_is_not_the_sessions_fault(run_session):
    with pytest.raises(NoReplicaError, match="none serves"):
        run_session(CountingReplica(dies_after=0))


@pytest.mark.parametrize(("new_takes_s", "error_type"), [(0.0, ""), (30.0, "TimeoutError")])
def test_a_session_is_charged_for_its_own_time_only(run_session, new_takes_s, error_type):
    """Its replica dies at once; for twice the session's deadline none serves, then another does."""
    router = Router({}, empty_deadline_s=20)

    class Dies(CountingReplica):
        async def generate(self, request_id, prompt_ids, sampling_params):
            new = CountingReplica(num_tokens=5, delay_s=new_takes_s)
            asyncio.get_running_loop().call_later(1.0, router.add, "new", new)
            raise ActorUnavailableError("it died")

    router.add("old", Dies())
    began = time.monotonic()
    _, result = run_session(router=router, deadlines__session=0.5)
    assert result.record.error_type == error_type
    assert len(result.rows) == (error_type == "")
    if error_type:
        assert "not finished after deadlines.session=0.5 s" in result.record.error_message
        assert 1.4 < time.monotonic() - began < 10


def test_a_loop_that_scores_itself_is_not_scored_again(run_session):
    @register("test_scores_itself")
    class ScoresItself(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return AgentLoopOutput(
                prompt_ids=[1], response_ids=[70], response_mask=[1], response_logprobs=[-1.0],
                weight_versions=[0], reward_score=3.0,
                extra_fields={"reward_extra_info": {"acc": 1.0}},
            )  # fmt: skip

    def reward(**row):
        raise AssertionError("not reached")

    _, result = run_session(fields={"agent_name": "test_scores_itself"}, reward=reward)
    assert (result.record.reward, result.record.reward_extra) == (3.0, {"acc": 1.0})


def test_a_prompt_that_is_too_long_is_cut_before_it_is_asked(run_session):
    # "Vowels, line 5" in the template has 33 tokens.
    limits = {"data__max_prompt_length": 20}
    _, whole = run_session()
    prompt = whole.rows[0]["prompts"].tolist()
    assert len(prompt) == 33
    _, cut = run_session(data__truncation="left", **limits)
    assert cut.rows[0]["prompts"].tolist() == prompt[-20:]
    _, cut = run_session(data__truncation="middle", **limits)
    assert cut.rows[0]["prompts"].tolist() == prompt[:10] + prompt[-10:]


def test_without_its_baseline_a_group_has_failed():
    def session(number, **fields):
        keys = [] if "error_type" in fields else [f"u_{number}_0"]
        record = SessionRecord(session_id=number, keys=keys, tags=[{} for _ in keys], **fields)
        return SessionResult(record=record, rows=[{} for _ in keys])

    good = [session(0, reward=1.0), session(1, error_type="KeyError", error_message="x")]
    found = with_baseline(good, session(2, reward=0.25))
    assert [result.record.tags for result in found] == [[{"baseline": 0.25}], []]
    broken = session(2, error_type="ValueError", error_message="session 2: no score")
    found = with_baseline(good, broken)
    assert [(r.record.session_id, r.record.error_message, r.rows) for r in found] == [
        (0, "session 2: no score", []),
        (1, "session 2: no score", []),
    ]


@pytest.fixture
def byte_tokenizer(make_config, tmp_path):
    """A folder of the tiny model with a tokenizer of bytes, and that tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(make_config().actor_rollout_ref.model.path, folder)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", END]
    core.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@pytest.mark.parametrize(
    ("budget", "said"), [(100, "It is 👩‍👩‍👧!"), (8, "It is \N{REPLACEMENT CHARACTER}")]
)
def test_emoji_arrive_as_they_are_and_half_ones_do_no_harm(
    run_session, byte_tokenizer, tmp_path, budget, said
):
    folder, tokenizer = byte_tokenizer
    question, answer = "Which is it, 🇪🇺 or 👩‍👩‍👧? " * 10, "It is 👩‍👩‍👧!"
    row = {
        "data_source": "mine", "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": "👩‍👩‍👧"}, "extra_info": {},
    }  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(8 * f"{json.dumps(row, ensure_ascii=False)}\n")
    seen = []

    def reward(solution_str, ground_truth, **rest):
        seen.append((solution_str, ground_truth))
        return 1.0

    replica = ScriptedReplica(tokenizer, lambda *_: answer, end_token_id=tokenizer.eos_token_id)
    _, result = run_session(
        replica, reward=reward, data__train_files=str(path), data__max_prompt_length=1000,
        data__max_response_length=budget, actor_rollout_ref__model__path=str(folder),
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=2048,
    )  # fmt: skip
    assert result.record.error_message == ""
    [stored] = result.rows
    assert question in tokenizer.decode(stored["prompts"])
    sampled = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    assert stored["responses"].tolist() == sampled[:budget]
    assert seen == [(said, "👩‍👩‍👧")]
