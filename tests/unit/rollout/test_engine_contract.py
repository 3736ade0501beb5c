"""What every engine promises, tried on each: what it samples, says and forgets.

The vllm half needs vLLM: `make test-vllm`. What only the embedded engine promises (bitwise equal
responses) is in test_transformers_engine.py. One file, though a long one: it is the contract.
"""

import random
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.errors import ConfigError, WeightSyncError, WeightTransferError
from rlcore.rollout.engine import EngineSpec, build_engine
from rlcore.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
SLOTS = 16
EOS, FIRST, VOCABULARY = 2, 4, 100
"""Of the tiny tokenizer; ordinary tokens begin at FIRST."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    # Predictions that are neither even nor certain: log-probs then mean something.
    build_tiny_model(path, num_layers=2, spread=0.12)
    return path


@pytest.fixture(scope="module")
def make_engine(folder):
    """Start an engine for a kind and a model, once; all end with the module."""
    made = {}

    def make(kind, path=folder):
        if (kind, path) not in made:
            spec = EngineSpec(
                name=kind, model_path=str(path), dtype="float32", max_num_seqs=SLOTS,
                max_model_len=256, num_threads=1,
            )  # fmt: skip
            made[kind, path] = build_engine(spec)
        return made[kind, path]

    yield make
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind, make_engine):
    """One for all tests: each leaves nothing in flight and the weights of the folder."""
    return make_engine(kind)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def update(engine, folder, tmp_path, model):
    """Put weights into the engine; those of the folder come back at the end."""
    versions = iter(range(engine.weight_version + 1, 10**6))

    def put(new):
        version = next(versions)
        meta = write_tensors(tmp_path / "w", list(new.state_dict().items()), "float32", version)
        assert engine.stage_weights(meta) == meta.checksum
        engine.commit_weights(version)
        assert engine.weight_version == version
        return version

    yield put
    put(model)


def prompt_of(seed, length):
    return random.Random(seed).choices(range(FIRST, VOCABULARY), k=length)


def start(engine, *requests):
    for request in requests:
        engine.check(request)
        engine.add(request)


def finish(engine, *requests):
    """Run `requests`, and what is in flight, to the end."""
    start(engine, *requests)
    outputs = {}
    deadline = time.monotonic() + 60
    while engine.in_flight:
        assert time.monotonic() < deadline, f"in flight: {engine.in_flight}"
        outputs.update(engine.step())
    return outputs


def until_tokens(engine, name, count):
    """Step until a request has `count` tokens."""
    deadline = time.monotonic() + 60
    while len(engine.partial(name).token_ids if engine.partial(name) else ()) < count:
        assert time.monotonic() < deadline
        assert engine.step() == []


def recomputed(model, prompt, token_ids, temperature=1.0):
    """Log-probs of `token_ids` by a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, -1)
    return expected.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def far_from(model, factor=1.3):
    """Return other weights."""
    other = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_scaled_distribution(engine, request_of, model, temperature):
    requests = [
        request_of(
            f"q{i}", prompt_of(i, 3 + 11 * i), seed=i, temperature=temperature, max_tokens=60
        )
        for i in range(12)
    ]
    outputs = finish(engine, *requests)
    differences = []
    for item in requests:
        output = outputs[item.request_id]
        assert (len(output.token_ids), output.stop_reason) == (60, "length")
        expected = recomputed(model, item.prompt_ids, output.token_ids, temperature)
        differences += np.abs(expected - output.log_probs).tolist()
    assert np.mean(differences) <= 1e-5
    assert np.max(differences) <= 1e-3
    # The bounds would not notice a distribution that is not scaled if all were alike.
    assert np.std([p for o in outputs.values() for p in o.log_probs]) > 0.5


def test_greedy_equals_generate_and_its_log_probs_are_unscaled(engine, request_of, model):
    prompt = prompt_of(8, 30)
    output = finish(engine, request_of("g", prompt, do_sample=False, max_tokens=32))["g"]
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 30, dtype=torch.long),
        max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert output.token_ids == expected[0, 30:].tolist()
    np.testing.assert_allclose(
        output.log_probs, recomputed(model, prompt, output.token_ids), atol=1e-4
    )


def test_a_seed_names_a_response_whatever_runs_beside_it(engine, request_of):
    prompt = prompt_of(5, 12)
    alone = finish(engine, request_of("a", prompt, seed=7))["a"]
    others = [request_of(f"o{i}", prompt_of(i, 30), seed=i, max_tokens=40) for i in range(10)]
    crowded = finish(engine, *others, request_of("b", prompt, seed=7))["b"]
    assert crowded.token_ids == alone.token_ids
    np.testing.assert_allclose(crowded.log_probs, alone.log_probs, atol=1e-4)
    group = [request_of(f"g{i}", prompt, seed=2**64 - 1 - i) for i in range(8)]
    assert len({tuple(o.token_ids) for o in finish(engine, *group).values()}) == 8


def test_sampling_follows_the_probabilities(engine, request_of, model):
    """First tokens of many seeds; a chi-square test over the frequent ones."""
    prompt = prompt_of(11, 9)
    seeds = random.Random(0)
    requests = [
        request_of(f"c{i}", prompt, seed=seeds.getrandbits(64), max_tokens=1) for i in range(800)
    ]
    counts = np.zeros(VOCABULARY)
    for output in finish(engine, *requests).values():
        counts[output.token_ids[0]] += 1
    with torch.no_grad():
        shares = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    frequent = shares * len(requests) >= 8
    observed = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(shares[frequent], shares[~frequent].sum()) * len(requests)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert freedom >= 8
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_stop_tokens_and_eos_end_the_response_and_belong_to_it(engine, request_of):
    prompt = prompt_of(4, 10)
    free = finish(engine, request_of("f", prompt, seed=9, max_tokens=50))["f"]
    stop = free.token_ids[7]
    end = free.token_ids.index(stop) + 1
    stopped = request_of("s", prompt, seed=9, max_tokens=50, stop_token_ids=(EOS, stop))
    output = finish(engine, stopped)["s"]
    assert output.stop_reason == "completed"
    assert output.token_ids == free.token_ids[:end]
    many = [
        request_of(f"e{i}", prompt, seed=i, max_tokens=200, ignore_eos=False, temperature=2.0)
        for i in range(SLOTS)
    ]
    ended = [o for o in finish(engine, *many).values() if o.stop_reason == "completed"]
    assert ended
    assert all(o.token_ids[-1] == EOS and EOS not in o.token_ids[:-1] for o in ended)


def test_stop_strings_end_the_response_and_the_token_that_completes_one_belongs_to_it(
    engine, request_of
):
    tokenizer = build_tiny_tokenizer()
    prompt = prompt_of(14, 10)
    greedy = {"do_sample": False, "max_tokens": 50}
    free = finish(engine, request_of("f", prompt, **greedy))["f"].token_ids
    text = tokenizer.decode(free[20:23])
    end = next(k for k in range(3, 24) if text in tokenizer.decode(free[:k]))
    output = finish(engine, request_of("s", prompt, stop=("never", text), **greedy))["s"]
    assert (output.stop_reason, output.token_ids) == ("completed", free[:end])
    assert len(output.log_probs) == end
    # A turn that was cut between two characters of the text.
    cut = request_of("c", prompt + free[: end - 1], position=end - 1, stop=(text,), **greedy)
    resumed = finish(engine, cut)["c"]
    assert (resumed.stop_reason, resumed.token_ids) == ("completed", free[end - 1 : end])
    # The prompt does not count.
    item = request_of("p", prompt + free[:end], stop=(text,), do_sample=False, max_tokens=1)
    assert finish(engine, item)["p"].stop_reason == "length"


def test_requests_that_cannot_run_are_refused(engine, request_of):
    with pytest.raises(ConfigError, match=r"250 prompt tokens \+ max_tokens 24 = 274 exceed"):
        engine.check(request_of("a", prompt_of(1, 250)))
    with pytest.raises(ConfigError, match="leave no prompt"):
        engine.check(request_of("a", [5, 6], position=2))


@pytest.mark.vllm
def test_what_vllm_alone_cannot_do_is_refused_per_request(make_engine, request_of):
    engine = make_engine("vllm")
    with pytest.raises(ConfigError, match=r"a: .*temperature must be in \[0, 2\]"):
        engine.check(request_of("a", [5, 6], temperature=8.0))
    with pytest.raises(ConfigError, match="not in the vocabulary of 100"):
        engine.check(request_of("a", [5, 100]))


def test_an_abort_with_every_slot_busy_returns_what_there_is_and_can_be_resumed(
    engine, request_of, model
):
    prompts = {f"a{i}": prompt_of(i, 12) for i in range(2 * SLOTS)}
    start(engine, *(request_of(n, p, seed=1, max_tokens=240) for n, p in prompts.items()))
    until_tokens(engine, "a0", 5)
    began = time.monotonic()
    outputs = {name: engine.abort(name) for name in prompts}
    assert time.monotonic() - began < 5
    assert engine.in_flight == []
    assert {o.stop_reason for o in outputs.values()} == {"aborted"}
    held = outputs["a0"]
    assert 5 <= len(held.token_ids) < 240
    assert len(held.token_ids) == len(held.log_probs) == len(held.weight_versions)
    assert engine.abort("a0") is None
    assert engine.partial("a0") is None
    done = len(held.token_ids)
    rest = request_of(
        "r", prompts["a0"] + held.token_ids, seed=1, position=done, max_tokens=40 - done % 20
    )  # fmt: skip
    output = finish(engine, rest)["r"]
    whole = held.token_ids + output.token_ids
    np.testing.assert_allclose(
        held.log_probs + output.log_probs, recomputed(model, prompts["a0"], whole), atol=1e-4
    )
    again = finish(engine, request_of("r2", rest.prompt_ids, seed=1, position=done, max_tokens=9))
    assert again["r2"].token_ids == output.token_ids[:9]


def test_what_is_held_samples_nothing_and_goes_on(engine, request_of):
    alone = finish(engine, request_of("w", prompt_of(2, 9), seed=4, max_tokens=200))["w"]
    start(engine, request_of("h", prompt_of(2, 9), seed=4, max_tokens=200))
    until_tokens(engine, "h", 10)
    engine.hold()
    engine.hold()
    held = engine.partial("h").token_ids
    time.sleep(0.3)
    assert engine.partial("h").token_ids == held
    assert len(held) < 200
    engine.go_on()
    assert finish(engine)["h"].token_ids == alone.token_ids


def test_a_response_over_an_update_names_the_version_of_each_token(
    engine, request_of, model, update
):
    prompt = prompt_of(5, 12)
    old = engine.weight_version
    start(engine, *(request_of(f"x{i}", prompt, seed=i, max_tokens=200) for i in range(SLOTS)))
    until_tokens(engine, "x3", 11)
    engine.hold()
    counts = {n: len(engine.partial(n).token_ids) for n in engine.in_flight}
    new = update(far_from(model))
    engine.go_on()
    outputs = finish(engine)
    for name, output in outputs.items():
        assert output.weight_versions == [old] * counts[name] + [new] * (200 - counts[name])
    before = outputs["x3"].token_ids[: counts["x3"]]
    np.testing.assert_allclose(
        outputs["x3"].log_probs[: counts["x3"]], recomputed(model, prompt, before), atol=1e-4
    )


def test_after_an_update_nothing_of_the_old_weights_is_used(engine, request_of, model, update):
    """A prompt of several cache blocks, seen before the update, is computed anew after it."""
    prompt = prompt_of(6, 150)
    old = engine.weight_version
    finish(engine, request_of("before", prompt, seed=1, max_tokens=8))
    assert finish(engine, request_of("b2", prompt, seed=1))["b2"].weight_versions == [old] * 24
    other = far_from(model)
    new = update(other)
    output = finish(engine, request_of("after", prompt, seed=1, max_tokens=40))["after"]
    assert output.weight_versions == [new] * 40
    np.testing.assert_allclose(
        output.log_probs, recomputed(other, prompt, output.token_ids), atol=1e-4
    )


def test_greedy_after_an_update_is_that_of_a_fresh_engine_with_the_same_weights(
    kind, engine, make_engine, request_of, model, update, tmp_path, folder
):
    other = far_from(model, 0.8)
    other.save_pretrained(tmp_path / "other")
    build_tiny_tokenizer().save_pretrained(tmp_path / "other")
    requests = [
        request_of(f"g{i}", prompt_of(i, 5 + 9 * i), do_sample=False, max_tokens=40)
        for i in range(8)
    ]
    before = finish(engine, *requests)
    update(other)
    updated = finish(engine, *requests)
    fresh = finish(make_engine(kind, tmp_path / "other"), *requests)
    for item in requests:
        name = item.request_id
        assert updated[name].token_ids == fresh[name].token_ids
        np.testing.assert_allclose(updated[name].log_probs, fresh[name].log_probs, atol=1e-5)
        assert not np.allclose(before[name].log_probs, fresh[name].log_probs, atol=1e-3)


def test_weights_that_do_not_fit_or_are_damaged_change_nothing(engine, request_of, model, tmp_path):
    item = request_of("a", prompt_of(6, 12), do_sample=False)
    before = finish(engine, item)["a"]
    version = engine.weight_version
    good = {n: torch.ones_like(t) for n, t in model.state_dict().items()}
    bad_shape = {n: t[..., :-1] if n == "model.norm.weight" else t for n, t in good.items()}
    lacking = {n: t for n, t in good.items() if n != "model.norm.weight"}
    for named, message in (
        (good | {"extra": torch.ones(3)}, "no parameter 'extra'"),
        (bad_shape, "model.norm.weight has shape"),
        (lacking, "lacks 1 parameters: model.norm.weight"),
    ):
        meta = write_tensors(tmp_path / "w", named.items(), "float32", 777)
        with pytest.raises(WeightSyncError, match=message):
            engine.stage_weights(meta)
        with pytest.raises(WeightSyncError, match="not staged"):
            engine.commit_weights(777)
    meta = write_tensors(tmp_path / "w", good.items(), "float32", 778)
    with (tmp_path / "w").open("r+b") as file:
        file.seek(meta.num_bytes // 2)
        file.write(b"\x07")
    with pytest.raises(WeightTransferError, match="checksum"):
        engine.stage_weights(meta)
    with pytest.raises(WeightSyncError, match="not staged"):
        engine.commit_weights(778)
    (tmp_path / "w").unlink()
    with pytest.raises(WeightSyncError, match="missing"):
        engine.stage_weights(meta)
    assert engine.weight_version == version
    after = finish(engine, item)["a"]
    assert (after.token_ids, after.weight_versions) == (before.token_ids, [version] * 24)
    np.testing.assert_allclose(after.log_probs, before.log_probs, atol=1e-5)


def test_staged_weights_are_used_from_the_commit_on_only(engine, request_of, model, tmp_path):
    item = request_of("a", prompt_of(7, 12), do_sample=False)
    before = finish(engine, item)["a"]
    version = engine.weight_version
    meta = write_tensors(
        tmp_path / "w", list(far_from(model).state_dict().items()), "float32", version + 1
    )
    engine.stage_weights(meta)
    staged = finish(engine, item)["a"]
    assert staged.weight_versions == [version] * 24
    np.testing.assert_allclose(staged.log_probs, before.log_probs, atol=1e-5)


def test_sleeping_and_waking_change_nothing_and_weights_may_come_between(
    engine, request_of, model, update
):
    item = request_of("a", prompt_of(7, 80), do_sample=False)
    before = finish(engine, item)["a"]
    engine.release_cache()
    engine.restore_cache()
    awake = finish(engine, item)["a"]
    assert awake.token_ids == before.token_ids
    engine.release_cache()
    other = far_from(model)
    update(other)
    engine.restore_cache()
    output = finish(engine, item)["a"]
    np.testing.assert_allclose(
        output.log_probs, recomputed(other, item.prompt_ids, output.token_ids), atol=1e-4
    )
    start(engine, item)
    with pytest.raises(ConfigError, match="in flight: a"):
        engine.release_cache()
    finish(engine)


def test_a_model_that_is_missing_is_a_user_error(kind, make_engine, tmp_path):
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        make_engine(kind, tmp_path / "nothing")
