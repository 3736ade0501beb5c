"""The training engine against what one would write first, and against the machine.

* shared: an update of groups with the shared prompt computed once (A) against once per response
  (B), the same rows, the shape of the SmolLM2 job. Target: at least 3.
* unique: an update of rows with prompts of their own (A) against a padded loop over transformers
  under bf16 autocast with logits of response positions only, at the best of several micro-batch
  sizes (B). Target: 1.05 at equal lengths, 2.0 at log-normal lengths (sigma 1).
* flops: 6 N FLOPs per token of an update of 8,192 tokens against the peak of bf16 products of the
  model's own shapes, both in this run. Target: at least 0.5.

Interleaved: one of A, one of B, and so on; the median of the pairs' ratios and their spread.

    python tests/bench/bench_training.py [shared|unique|flops ...] [--pairs 5] [--model DIR]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rlcore.testing.update_rows import random_rows
from rlcore.training.batches import MicroBatchLimits, Rows
from rlcore.training.policy import Policy
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.update import PolicyUpdater

TARGETS = {"shared": 3.0, "unique, equal": 1.05, "unique, log-normal": 2.0, "flops": 0.5}
NEXT_TO_NOTHING = 1e-30
BUDGETS = (1024, 2048, 4096)
"""Tokens of a micro-batch; each side takes its best."""


def updater(model: str, folder: str, tokens: int, packing: str = "shared_prefix") -> PolicyUpdater:
    """Return what makes our optimizer steps."""
    spec = TrainingSpec(
        run_id="bench",
        attempt=1,
        folder=folder,
        model_path=model,
        learning_rate=LearningRate(peak=NEXT_TO_NOTHING),
        micro_batch_tokens=tokens,
        packing=packing,  # type: ignore[arg-type]
    )
    return PolicyUpdater(Policy(model, dtype="bfloat16", packing=spec.packing), spec)


class PaddedLoop:
    """A plain update: padded rows in order of arrival, logits where responses are predicted."""

    def __init__(self, model: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=NEXT_TO_NOTHING, fused=True)

    def step(self, rows: Rows, size: int) -> None:
        """Make one optimizer step in micro-batches of `size` rows."""
        self.optimizer.zero_grad(set_to_none=True)
        count = len(rows["prompts"])
        total = sum(len(response) for response in rows["responses"])
        for start in range(0, count, size):
            chosen = range(start, min(start + size, count))
            self._loss(rows, list(chosen), total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _loss(self, rows: Rows, chosen: list[int], total: int) -> torch.Tensor:
        whole = [torch.cat([rows["prompts"][i], rows["responses"][i]]) for i in chosen]
        ids = pad_sequence(whole, batch_first=True)
        lengths = torch.tensor([len(row) for row in whole])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        where = [
            torch.arange(len(rows["responses"][i])) + len(rows["prompts"][i]) - 1 for i in chosen
        ]
        row_of = torch.cat([torch.full_like(w, n) for n, w in enumerate(where)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(ids, attention_mask=mask, use_cache=False)[0]
            logits = self.model.lm_head(hidden[row_of, torch.cat(where)])
        logp = torch.log_softmax(logits.float(), -1)
        targets = torch.cat([rows["responses"][i] for i in chosen])
        chosen_logp = logp.gather(-1, targets[:, None])[:, 0]
        old = torch.cat([rows["old_log_probs"][i] for i in chosen])
        advantages = torch.cat([rows["advantages"][i] for i in chosen])
        ratio = (chosen_logp - old).exp()
        worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return worse.sum() / total


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def pairs(first: Callable[[], object], second: Callable[[], object], count: int) -> list[float]:
    """Return how many times faster `first` is, in `count` interleaved pairs."""
    ratios: list[float] = []
    for _ in range(count):
        own = seconds(first)
        ratios.append(seconds(second) / own)
    return ratios


def report(name: str, ratios: list[float]) -> bool:
    """Print a ratio; return whether the target is reached."""
    median = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs"
    is_reached = median >= TARGETS[name]
    verdict = "reached" if is_reached else "NOT reached"
    print(f"{name}: {median:.2f} ({spread}); target {TARGETS[name]:g} {verdict}", flush=True)
    return is_reached


def shared(model: str, folder: str, count: int) -> bool:
    """8 prompts x 8 responses of 12 tokens after 60."""
    rows = random_rows([60] * 64, [12] * 64, per_group=8)
    packed = updater(model, folder, 8192)
    single = updater(model, folder, 8192, packing="padded")
    everything = list(range(64))
    for one in (packed, single):
        one.step(rows, everything, NEXT_TO_NOTHING)
    return report(
        "shared",
        pairs(
            lambda: packed.step(rows, everything, NEXT_TO_NOTHING),
            lambda: single.step(rows, everything, NEXT_TO_NOTHING),
            count,
        ),
    )


def unique(model: str, folder: str, count: int) -> bool:
    """32 rows, each with a prompt of its own."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(32, generator=generator).exp() * 80
    lengths = {
        "unique, equal": [128] * 32,
        "unique, log-normal": [int(value) for value in spread.clamp(8, 1024)],
    }
    ours, plain = updater(model, folder, BUDGETS[0]), PaddedLoop(model)
    everything, is_reached = list(range(32)), True
    for name, responses in lengths.items():
        rows = random_rows([40] * 32, responses, per_group=1)

        def own(rows: Rows = rows) -> None:
            ours.step(rows, everything, NEXT_TO_NOTHING)

        def budget(tokens: int) -> None:
            ours.limits = MicroBatchLimits(max_rows=None, max_tokens=tokens)

        timed = {}
        for tokens in BUDGETS:
            budget(tokens)
            timed[tokens] = min(seconds(own) for _ in range(2))
        budget(min(timed, key=timed.__getitem__))
        sizes = {
            size: min(
                seconds(lambda size=size, rows=rows: plain.step(rows, size)) for _ in range(2)
            )
            for size in (2, 4, 8, 16)
        }
        best = min(sizes, key=sizes.__getitem__)
        found = pairs(own, lambda rows=rows, best=best: plain.step(rows, best), count)
        is_reached &= report(name, found)
    return is_reached


def flops(model: str, folder: str, count: int) -> bool:
    """Share of the machine's product peak that an update of 8,192 tokens reaches."""
    ours = updater(model, folder, 2048)
    rows = random_rows([64] * 32, [192] * 32, per_group=1)
    num_parameters = sum(p.numel() for p in ours.model.net.parameters())
    work = 6 * num_parameters * 8192
    shapes = {tuple(p.shape) for p in ours.model.net.parameters() if p.ndim == 2}
    shares: list[float] = []
    ours.step(rows, list(range(32)), NEXT_TO_NOTHING)
    for _ in range(count):
        taken = seconds(lambda: ours.step(rows, list(range(32)), NEXT_TO_NOTHING))
        shares.append(work / taken / peak(shapes))
    return report("flops", shares)


def peak(shapes: set[tuple[int, ...]]) -> float:
    """FLOP/s of the fastest of the model's own products, bf16."""
    best = 0.0
    for rows, columns in shapes:
        if rows > 8192:  # the vocabulary's, which is cut into slices
            continue
        a = torch.randn(2048, columns).bfloat16()
        b = torch.randn(rows, columns).bfloat16()
        taken = min(seconds(lambda a=a, b=b: a @ b.t()) for _ in range(5))
        best = max(best, 2 * 2048 * rows * columns / taken)
    return best


def main() -> int:
    """Run the named benches, all by default; return 1 if a target is missed."""
    benches = {"shared": shared, "unique": unique, "flops": flops}
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*benches, []])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    given = parser.parse_args()
    if not Path(given.model).is_dir():
        print(f"{given.model} is not there: run `rollflow prepare smollm2`")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        reached = [
            benches[name](given.model, folder, given.pairs) for name in given.names or benches
        ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
