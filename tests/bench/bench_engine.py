"""The embedded engine against bare transformers `generate`, at equal and at log-normal lengths.

    python tests/bench/bench_engine.py [--pairs 5] [--model FOLDER] [--only smollm2|tiny|lengths]

64 distinct prompts of 20 tokens, 64 new tokens each, EOS ignored; each pair runs both, in turns, on
the same prompts. Wall time; the engine does more than the baseline (log-probs, a seed per request,
versions, requests that come and go) and must still reach the target ratio.

`lengths`: 192 prompts whose responses have log-normal lengths (sigma 1, median 32, cut at 4 times
that). The engine fills a slot as soon as it is free; `generate` takes 64 at a time and goes on to
the longest of them.
"""

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM

from rlcore.rollout.engine import EngineRequest
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.testing.tiny_model import build_tiny_model

NUM_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 20, 64
SMOLLM2 = "models/smollm2-135m-instruct"
NUM_LONG, MEDIAN, SIGMA = 192, 32, 1.0
LONGEST = 4 * MEDIAN
TARGETS = {"smollm2": 1.15, "tiny": 0.8, "lengths": 1.5}


def prompts_of(seed: int, vocab_size: int, count: int = NUM_SEQUENCES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size, (count, PROMPT_TOKENS), generator=generator)


def lengths_of(seed: int, count: int) -> list[int]:
    drawn = random.Random(seed)
    found = [math.exp(drawn.gauss(math.log(MEDIAN), SIGMA)) for _ in range(count)]
    return [max(1, round(min(LONGEST, length))) for length in found]


def time_engine(engine: TransformersEngine, prompts: torch.Tensor, lengths: list[int]) -> float:
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True)):
        params = SamplingParams(max_tokens=length, seed=i, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(i), prompt_ids=prompt, params=params))
    finished = []
    while len(finished) < len(prompts):
        finished += engine.step()
    seconds = time.perf_counter() - begin
    assert all(len(output.token_ids) == lengths[int(name)] for name, output in finished)
    return seconds


def time_generate(model, prompts: torch.Tensor, lengths: list[int]) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(prompts), NUM_SEQUENCES):
            batch = prompts[first : first + NUM_SEQUENCES]
            longest = max(lengths[first : first + NUM_SEQUENCES])
            out = model.generate(
                batch, attention_mask=torch.ones_like(batch), max_new_tokens=longest,
                do_sample=True, top_k=0, temperature=1.0, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            assert out.shape[1] == batch.shape[1] + longest
    return time.perf_counter() - begin


def compare(name: str, folder: str, dtype: str, pairs: int) -> bool:
    longest = PROMPT_TOKENS + (LONGEST if name == "lengths" else NEW_TOKENS)
    engine = TransformersEngine(folder, dtype, NUM_SEQUENCES, longest, torch.get_num_threads())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    vocab_size = model.config.vocab_size
    count = NUM_LONG if name == "lengths" else NUM_SEQUENCES
    warm_up = prompts_of(0, vocab_size)
    time_engine(engine, warm_up, [4] * NUM_SEQUENCES)
    time_generate(model, warm_up, [4] * NUM_SEQUENCES)
    ratios = []
    for pair in range(1, pairs + 1):
        prompts = prompts_of(pair, vocab_size, count)
        lengths = lengths_of(pair, count) if name == "lengths" else [NEW_TOKENS] * count
        # The first of a pair has the other's caches against it: take turns.
        if pair % 2:
            ours = time_engine(engine, prompts, lengths)
            theirs = time_generate(model, prompts, lengths)
        else:
            theirs = time_generate(model, prompts, lengths)
            ours = time_engine(engine, prompts, lengths)
        ratios.append(theirs / ours)
        tokens = sum(lengths)
        print(
            f"{name} pair {pair}: engine {tokens / ours:,.0f} tokens/s, generate "
            f"{tokens / theirs:,.0f} tokens/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    median = statistics.median(ratios)
    reached = median >= TARGETS[name]
    print(
        f"{name} {dtype}: median ratio {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, "
        f"{pairs} pairs, {torch.get_num_threads()} threads), target {TARGETS[name]}: "
        f"{'reached' if reached else 'MISSED'}"
    )
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    reached = []
    if options.only in (None, "tiny"):
        with tempfile.TemporaryDirectory() as folder:
            build_tiny_model(Path(folder))
            # Pairs of a fifth of a second: more of them cost nothing and the median is steadier.
            reached.append(compare("tiny", folder, "float32", 3 * options.pairs))
    if options.only != "tiny":
        if not Path(options.model, "config.json").exists():
            sys.exit(f"{options.model} is missing: `make model` makes it")
        for name in ("smollm2", "lengths"):
            if options.only in (None, name):
                reached.append(compare(name, options.model, "bfloat16", options.pairs))
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
