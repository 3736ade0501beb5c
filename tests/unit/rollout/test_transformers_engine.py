"""What the embedded engine promises beyond test_engine_contract.py: the same bits."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.errors import ConfigError
from rlcore.rollout.transformers_engine import TransformersEngine

DTYPES = ["float32", "bfloat16"]


def _prompt(seed, length):
    return random.Random(seed).sample(range(3, 300), length)


def _same(a, b):
    return a.token_ids == b.token_ids and a.log_probs == b.log_probs


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype", "trials", "longest"),
    [("small", "float32", 4, 130), ("small", "bfloat16", 4, 130), ("smollm2", "bfloat16", 2, 60)],
)
def test_a_response_does_not_depend_on_the_others_or_on_when_they_arrive(
    engines, run, request_of, shape, dtype, trials, longest, num_threads
):
    engine = engines(dtype, shape, num_threads)
    probe = request_of("probe", _prompt(1, 19), seed=77, max_tokens=40)
    alone = run(engine, {0: [probe]})["probe"]
    assert len(alone.token_ids) == 40
    for trial in range(trials):
        rng = random.Random(trial)
        arrivals = {}
        for i in range(30):
            prompt = _prompt(rng.random(), rng.choice([1, 2, 9, 19, 33, 120]))
            other = request_of(
                f"{trial}-{i}", prompt, seed=i, max_tokens=rng.randint(1, longest),
                temperature=rng.choice([0.5, 1.0]), do_sample=rng.random() < 0.8,
            )  # fmt: skip
            arrivals.setdefault(rng.randint(0, 60), []).append(other)
        arrivals.setdefault(rng.randint(0, 60), []).insert(0, probe)
        assert _same(run(engine, arrivals)["probe"], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_shares_its_prefill_and_each_member_is_as_if_alone(engines, run, request_of, dtype):
    engine = engines(dtype)
    prompt = _prompt(2, 45)
    members = [request_of(f"m{i}", prompt, seed=i, max_tokens=12) for i in range(8)]
    together = run(engine, {0: members})
    late = run(engine, {0: members[:1], 5: members[1:]})
    for member in members:
        alone = run(engine, {0: [member]})[member.request_id]
        assert _same(together[member.request_id], alone)
        assert _same(late[member.request_id], alone)
    assert len({tuple(o.token_ids) for o in together.values()}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_abort_and_resume_give_the_same_response(engines, run, request_of, dtype):
    engine = engines(dtype)
    prompt = _prompt(3, 21)
    whole = run(engine, {0: [request_of("w", prompt, seed=5, max_tokens=30)]})["w"]
    others = [request_of(f"o{i}", _prompt(i, 50), max_tokens=60) for i in range(10)]
    engine.add(request_of("p", prompt, seed=5, max_tokens=30))
    for _ in range(14):
        engine.step()
    first = engine.abort("p")
    assert first.stop_reason == "aborted"
    done = len(first.token_ids)
    assert 0 < done < 30
    rest = request_of(
        "r", prompt + first.token_ids, seed=5, position=done, max_tokens=30 - done
    )  # fmt: skip
    second = run(engine, {0: others, 3: [rest]})["r"]
    assert first.token_ids + second.token_ids == whole.token_ids
    assert first.log_probs + second.log_probs == whole.log_probs


def test_without_exact_resume_the_tokens_are_prefilled(model_folder, run, request_of):
    engine = TransformersEngine(str(model_folder), "float32", 16, 256, 1, exact_resume=False)
    prompt = _prompt(3, 21)
    whole = run(engine, {0: [request_of("w", prompt, seed=5, max_tokens=10)]})["w"]
    rest = request_of("r", prompt + whole.token_ids[:6], seed=5, position=6, max_tokens=4)
    engine.add(rest)
    steps, outputs = 0, []
    while not outputs:
        outputs, steps = engine.step(), steps + 1
    assert steps == 5  # one prefill and four tokens, nothing replayed
    assert outputs[0][1].token_ids == whole.token_ids[6:]
    np.testing.assert_allclose(outputs[0][1].log_probs, whole.log_probs[6:], atol=1e-4)


def test_impossible_engines_are_refused(model_folder, tmp_path):
    with pytest.raises(ConfigError, match="max_num_seqs is 8"):
        TransformersEngine(str(model_folder), "float32", 8, 64)
    with pytest.raises(ConfigError, match="exceed the model's 512 positions"):
        TransformersEngine(str(model_folder), "float32", 16, 513)
    with pytest.raises(ConfigError, match="float16"):
        TransformersEngine(str(model_folder), "float16", 16, 64)
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        TransformersEngine(str(tmp_path), "float32", 16, 64)


def _publish(path, model, version, dtype="float32"):
    return write_tensors(path, list(model.state_dict().items()), dtype, version)


def test_committed_weights_sample_and_are_named_per_token(model_folder, tmp_path, run, request_of):
    engine = TransformersEngine(str(model_folder), "float32", 16, 128, 1)
    prompt = _prompt(5, 12)
    old = run(engine, {0: [request_of("a", prompt, seed=1)]})["a"]
    other = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    engine.add(request_of("b", prompt, seed=1))
    for _ in range(11):
        engine.step()
    engine.stage_weights(_publish(tmp_path / "w", other, 4))
    assert engine.weight_version == 0
    engine.commit_weights(4)
    crossing = run(engine, {})["b"]
    assert crossing.weight_versions == [0] * 11 + [4] * 13
    assert crossing.token_ids[:11] == old.token_ids[:11]
    new = run(engine, {0: [request_of("c", prompt, seed=1)]})["c"]
    assert set(new.weight_versions) == {4}
    ids = torch.tensor([prompt + new.token_ids])
    with torch.no_grad():
        expected = torch.log_softmax(other(ids).logits[0, 11:-1], -1)
    expected = expected.gather(1, torch.tensor(new.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(new.log_probs, expected, atol=1e-3)
    # Back to the first weights: the same bits as before.
    original = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engine.stage_weights(_publish(tmp_path / "w", original, 5))
    engine.commit_weights(5)
    assert _same(run(engine, {0: [request_of("d", prompt, seed=1)]})["d"], old)


def test_sleep_frees_the_cache_and_waking_changes_nothing(model_folder, run, request_of):
    engine = TransformersEngine(str(model_folder), "float32", 16, 128, 1)
    item = request_of("a", _prompt(7, 30), seed=1)
    before = run(engine, {0: [item]})["a"]
    engine.release_cache()
    assert engine._cache.num_bytes == 0
    engine.restore_cache()
    assert _same(run(engine, {0: [item]})["a"], before)
    engine.add(item)
    with pytest.raises(ConfigError, match="in flight: a"):
        engine.release_cache()


def test_aborted_while_waiting_or_prefilling(engines, run, request_of):
    engine = engines()
    items = [request_of(f"w{i}", _prompt(i, 20 + i), max_tokens=4) for i in range(20)]
    for item in items:
        engine.add(item)
    assert engine.abort("w19").token_ids == []  # never had a slot
    engine.step()
    assert engine.abort("w15").token_ids == []  # has one, its prompt is not prefilled yet
    assert engine.abort("nobody") is None
    assert engine.partial("w0").token_ids == []
    outputs = run(engine, {})
    assert sorted(outputs) == sorted(f"w{i}" for i in range(20) if i not in (15, 19))
    assert engine.partial("w0") is None
