"""Random numbers and inverse-CDF sampling."""

import numpy as np
import pytest
import torch

from rlcore.errors import ConfigError
from rlcore.rollout.sampling import SlotSampler, uniform
from rlcore.rollout.sampling_params import SamplingParams


def _sample(sampler, logits, uniforms, temperature=1.0, do_sample=True, top_p=1.0, top_k=0):
    n = len(logits)
    return sampler.sample(
        logits,
        np.full(n, temperature, dtype=np.float32),
        np.full(n, do_sample),
        np.asarray(uniforms, dtype=np.float64),
        np.broadcast_to(np.asarray(top_p, dtype=np.float32), n).copy(),
        np.broadcast_to(np.asarray(top_k, dtype=np.int64), n).copy(),
    )


def test_uniform_depends_on_seed_and_position_only():
    seeds = np.array([3, 3, 4, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 1, 0, 5], dtype=np.int64)
    together = uniform(seeds, positions)
    for i in range(4):
        assert uniform(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert len(set(together)) == 4


def test_uniform_is_uniform_along_positions_and_along_seeds():
    n = 100_000
    counter = np.arange(n)
    for numbers in (
        uniform(np.full(n, 7, dtype=np.uint64), counter),
        uniform(counter.astype(np.uint64), np.zeros(n, dtype=np.int64)),
    ):
        counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
        # Chi-square with 99 degrees of freedom: mean 99, standard deviation 14.
        assert 40 < ((counts - 1000) ** 2 / 1000).sum() < 170
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


def test_streams_of_neighbouring_seeds_share_no_numbers():
    positions = np.arange(1000)
    streams = [set(uniform(np.full(1000, s, dtype=np.uint64), positions)) for s in range(20)]
    assert len(set.union(*streams)) == 20_000


def test_inverse_cdf_takes_the_token_whose_interval_holds_the_number():
    # Probabilities 0.1, 0.2, 0.3, 0.4: intervals end at 0.1, 0.3, 0.6, 1.
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    tokens, log_probs = _sample(SlotSampler(6, 4), logits, [0.0, 0.05, 0.15, 0.45, 0.65, 0.999999])
    assert tokens.tolist() == [0, 0, 1, 2, 3, 3]
    expected = np.log([0.1, 0.1, 0.2, 0.3, 0.4, 0.4])
    np.testing.assert_allclose(log_probs, expected, atol=1e-6)


def test_top_p_and_top_k_keep_the_most_likely_tokens_of_their_row_alone():
    # Probabilities 0.1, 0.2, 0.3, 0.4. A share of 0.7 is held by the last two (0.4 + 0.3), 0.71 by
    # three; of the two most likely alone a share of 0.5 is held by the last (0.4 of 0.7).
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    top_p, top_k = [0.69, 0.71, 1.0, 0.5, 1.0, 1e-6], [0, 0, 1, 2, 0, 0]
    draws = np.linspace(0, 0.9999, 50)
    seen = [set() for _ in top_p]
    for draw in draws:
        tokens, log_probs = _sample(
            SlotSampler(6, 4), logits, np.full(6, draw), top_p=top_p, top_k=top_k
        )
        for row, token in enumerate(tokens.tolist()):
            seen[row].add(token)
            # Of the whole distribution, so that they can be compared with the trainer's.
            assert log_probs[row] == pytest.approx(np.log([0.1, 0.2, 0.3, 0.4][token]), abs=1e-6)
    assert seen == [{2, 3}, {1, 2, 3}, {3}, {3}, {0, 1, 2, 3}, {3}]


@pytest.mark.parametrize("vocab_size", [200, 1000])
def test_a_row_that_is_not_cut_does_not_notice_others_that_are(vocab_size):
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(3))
    draws = [0.1, 0.4, 0.7, 0.9]
    tokens, log_probs = _sample(SlotSampler(4, vocab_size), logits, draws)
    mixed, mixed_log_probs = _sample(
        SlotSampler(4, vocab_size), logits, draws, top_p=[0.3, 1, 1, 1], top_k=[0, 5, 0, 0]
    )
    assert mixed[2:].tolist() == tokens[2:].tolist()
    assert mixed_log_probs[2:].tobytes() == log_probs[2:].tobytes()


@pytest.mark.parametrize("vocab_size", [5, 256, 1000])
def test_frequencies_follow_the_softmax_at_temperature(vocab_size):
    torch.manual_seed(0)
    rows = 4000
    logits = torch.randn(1, vocab_size).expand(rows, -1)
    sampler = SlotSampler(rows, vocab_size)
    numbers = uniform(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
    tokens, log_probs = _sample(sampler, logits, numbers, temperature=0.7)
    log_softmax = torch.log_softmax(logits[0] / 0.7, -1).numpy()
    np.testing.assert_allclose(log_probs, log_softmax[tokens], atol=2e-6)
    top = np.argsort(log_softmax)[-3:]
    for token in top:
        p = np.exp(log_softmax[token])
        seen = (tokens == token).mean()
        assert abs(seen - p) < 4 * np.sqrt(p * (1 - p) / rows)


def test_a_token_of_zero_probability_is_never_chosen():
    logits = torch.full((4, 700), -torch.inf)
    logits[:, 300] = 0.0
    logits[:, 600] = -200.0  # underflows to zero probability
    tokens, log_probs = _sample(SlotSampler(4, 700), logits, [0.0, 0.5, 1 - 2**-53, 0.999])
    assert tokens.tolist() == [300] * 4
    assert log_probs.tolist() == [0.0] * 4


def test_greedy_takes_the_most_likely_token_and_its_log_prob():
    torch.manual_seed(1)
    logits = torch.randn(16, 300).bfloat16()
    tokens, log_probs = _sample(SlotSampler(16, 300), logits, np.zeros(16), do_sample=False)
    assert tokens.tolist() == logits.float().argmax(-1).tolist()
    expected = torch.log_softmax(logits.float(), -1).max(-1).values
    np.testing.assert_allclose(log_probs, expected, atol=2e-6)


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(2)
    sampler = SlotSampler(16, 5000)
    row = torch.randn(5000)
    results = set()
    for place in (0, 7, 15):
        logits = torch.randn(16, 5000) * 3
        logits[place] = row
        numbers = np.random.default_rng(place).random(16)
        numbers[place] = 0.4321
        tokens, log_probs = _sample(sampler, logits, numbers, temperature=0.9)
        results.add((int(tokens[place]), float(log_probs[place])))
    assert len(results) == 1


def test_params_from_dict():
    params = SamplingParams.from_dict(
        {"temperature": 0.7, "max_tokens": 9, "seed": 2**64 - 1, "position": 3, "top_p": 0.8,
         "top_k": -1, "stop_token_ids": [4, 5], "do_sample": True}
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.8, seed=2**64 - 1, position=3, stop_token_ids=(4, 5)
    )
    greedy = SamplingParams.from_dict({"temperature": 0, "max_tokens": 1})
    assert not greedy.do_sample
    assert greedy.temperature == 1.0


def test_all_problems_of_params_are_listed():
    with pytest.raises(ConfigError) as caught:
        SamplingParams.from_dict(
            {
                "top_p": 1.5,
                "top_k": -2,
                "min_p": 0.1,
                "temperature": -1,
                "max_tokens": 0,
                "beams": 2,
                "seed": -1,
            }
        )
    for part in (
        "min_p=0.1",
        "top_p is 1.5",
        "top_k is -2",
        "temperature is -1",
        "max_tokens is 0",
        "unknown: beams",
        "seed is",
    ):
        assert part in str(caught.value)


def test_sampling_without_a_seed_is_refused():
    with pytest.raises(ConfigError, match="seed is missing"):
        SamplingParams.from_dict({"temperature": 1.0, "max_tokens": 4})
