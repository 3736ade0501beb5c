"""The embedded engine against bare transformers `generate`, at equal lengths.

    python tests/bench/bench_engine.py [--pairs 5] [--model FOLDER] [--only smollm2|tiny]

64 distinct prompts of 20 tokens, 64 new tokens each, EOS ignored; each pair runs both, in turns, on
the same prompts. Wall time; the engine does more than the baseline (log-probs, a seed per request,
versions, requests that come and go) and must still reach the target ratio.
"""

import argparse
import os
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
TARGETS = {"smollm2": 1.15, "tiny": 0.8}


def prompts_of(seed: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size, (NUM_SEQUENCES, PROMPT_TOKENS), generator=generator)


def time_engine(engine: TransformersEngine, prompts: torch.Tensor, new_tokens: int) -> float:
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts.tolist()):
        params = SamplingParams(max_tokens=new_tokens, seed=i, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(i), prompt_ids=prompt, params=params))
    finished = []
    while len(finished) < len(prompts):
        finished += engine.step()
    seconds = time.perf_counter() - begin
    assert all(len(output.token_ids) == new_tokens for _, output in finished)
    return seconds


def time_generate(model, prompts: torch.Tensor, new_tokens: int) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens,
            do_sample=True, top_k=0, temperature=1.0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    assert out.shape[1] == prompts.shape[1] + new_tokens
    return seconds


def compare(name: str, folder: str, dtype: str, pairs: int) -> bool:
    engine = TransformersEngine(folder, dtype, NUM_SEQUENCES, 128, torch.get_num_threads())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    vocab_size = model.config.vocab_size
    warm_up = prompts_of(0, vocab_size)
    time_engine(engine, warm_up, 4)
    time_generate(model, warm_up, 4)
    ratios = []
    for pair in range(1, pairs + 1):
        prompts = prompts_of(pair, vocab_size)
        # The first of a pair has the other's caches against it: take turns.
        if pair % 2:
            ours = time_engine(engine, prompts, NEW_TOKENS)
            theirs = time_generate(model, prompts, NEW_TOKENS)
        else:
            theirs = time_generate(model, prompts, NEW_TOKENS)
            ours = time_engine(engine, prompts, NEW_TOKENS)
        ratios.append(theirs / ours)
        tokens = NUM_SEQUENCES * NEW_TOKENS
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
    if options.only != "smollm2":
        with tempfile.TemporaryDirectory() as folder:
            build_tiny_model(Path(folder))
            # Pairs of a fifth of a second: more of them cost nothing and the median is steadier.
            reached.append(compare("tiny", folder, "float32", 3 * options.pairs))
    if options.only != "tiny":
        if not Path(options.model, "config.json").exists():
            sys.exit(f"{options.model} is missing: `make model` makes it")
        reached.append(compare("smollm2", options.model, "bfloat16", options.pairs))
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
