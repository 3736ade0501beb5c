"""An update against a plain loop, and against what the machine can multiply.

`equal`, `ragged`: unique prompts, nothing shared. Ours (A) against transformers under bf16 autocast
with padded rows, logits of response positions only, the same loss, clipping and AdamW (B), at the
micro-batch that is fastest for it. Targets: at least 1.05 at equal lengths, 2.0 at log-normal ones.

`flops`: 6 FLOPs per token and weight (embedding left out; the output projection counts at response
positions) of an update of 8,192 tokens, against the products of the model's own shapes alone, in
bf16, forward and the two of backward. Target: at least 0.5.

Interleaved: one of A, one of B, and so on; the median of the pairs' ratios and their spread.

    python tests/bench/bench_update.py [equal] [ragged] [flops] [--pairs 5] [--model DIR]
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlcore.algorithms import ppo_loss
from rlcore.testing.update_rows import random_rows
from rlcore.training.batches import Rows
from rlcore.training.policy import Policy
from rlcore.training.row_model import decoder_layers
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.update import PolicyUpdater

TARGETS = {"equal": 1.05, "ragged": 2.0, "flops": 0.5}
NEXT_TO_NOTHING = 1e-30
ROWS = 32
MICRO_BATCHES = (1, 2, 4, 8, 16)
FLOPS_TOKENS = 8192
AT_ONCE = 4096


def updater(model: str, folder: str) -> PolicyUpdater:
    """Return what makes our optimizer steps."""
    spec = TrainingSpec(
        run_id="bench",
        attempt=1,
        folder=folder,
        model_path=model,
        learning_rate=LearningRate(peak=NEXT_TO_NOTHING),
        micro_batch_tokens=AT_ONCE,
    )
    return PolicyUpdater(Policy(model, dtype="bfloat16"), spec)


class PlainLoop:
    """The baseline: padded rows in micro-batches of a fixed number."""

    def __init__(self, model: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=NEXT_TO_NOTHING, fused=True)

    def step(self, rows: Rows, size: int) -> None:
        """Make one optimizer step; neighbours are of like length."""
        count = len(rows["responses"])
        by_length = sorted(range(count), key=lambda i: _length(rows, i))
        num_tokens = sum(len(response) for response in rows["responses"])
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, count, size):
            self._backward(rows, by_length[start : start + size], num_tokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _backward(self, rows: Rows, chosen: Sequence[int], num_tokens: int) -> None:
        prompts = [rows["prompts"][i] for i in chosen]
        before, after = max(map(len, prompts)), max(len(rows["responses"][i]) for i in chosen)
        ids = torch.zeros(len(chosen), before + after, dtype=torch.long)
        attended = torch.zeros_like(ids)
        old, adv, mask = (torch.zeros(len(chosen), after) for _ in range(3))
        for row, i in enumerate(chosen):
            prompt, response = rows["prompts"][i], rows["responses"][i]
            end = before + len(response)
            ids[row, before - len(prompt) : end] = torch.cat([prompt, response])
            attended[row, before - len(prompt) : end] = 1
            old[row, : len(response)] = rows["old_log_probs"][i]
            adv[row, : len(response)] = rows["advantages"][i]
            mask[row, : len(response)] = 1
        positions = (attended.cumsum(-1) - 1).clamp(min=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(
                input_ids=ids,
                attention_mask=attended,
                position_ids=positions,
                logits_to_keep=after + 1,
                use_cache=False,
            ).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, before:, None])[..., 0]
        loss = ppo_loss(old, logp, adv, mask, agg_kw={"batch_num_tokens": num_tokens})
        loss.backward()


def _length(rows: Rows, row: int) -> int:
    return len(rows["prompts"][row]) + len(rows["responses"][row])


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def report(name: str, ratios: list[float]) -> bool:
    """Print a ratio; return whether the target is reached."""
    median = statistics.median(ratios)
    is_reached = median >= TARGETS[name]
    verdict = "reached" if is_reached else "NOT reached"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs"
    print(f"{name}: {median:.2f} ({spread}); target {TARGETS[name]:g} {verdict}", flush=True)
    return is_reached


def against_the_loop(name: str, model: str, folder: str, count: int) -> bool:
    """Run pairs of our step and the loop's on rows of which no two share a prompt."""
    before, after = _lengths(name)
    rows = random_rows(before, after, per_group=1)
    ours, loop = updater(model, folder), PlainLoop(model)
    everything = list(range(ROWS))
    ours.step(rows, everything, NEXT_TO_NOTHING)
    loop.step(rows, MICRO_BATCHES[0])
    times = {size: seconds(lambda size=size: loop.step(rows, size)) for size in MICRO_BATCHES}
    best = min(times, key=lambda size: times[size])
    print(f"{name}: the loop is fastest with {best} rows at once", flush=True)
    ratios: list[float] = []
    for _ in range(count):
        own = seconds(lambda: ours.step(rows, everything, NEXT_TO_NOTHING))
        ratios.append(seconds(lambda: loop.step(rows, best)) / own)
    return report(name, ratios)


def _lengths(name: str) -> tuple[list[int], list[int]]:
    """Prompt and response lengths: 64 and 64, or log-normal of sigma 1 with median 32."""
    if name == "equal":
        return [64] * ROWS, [64] * ROWS
    draw = random.Random(0)
    return [64] * ROWS, [
        max(1, min(512, round(draw.lognormvariate(3.5, 1.0)))) for _ in range(ROWS)
    ]


def flops(model: str, folder: str, count: int) -> bool:
    """Compare an update of 8,192 tokens with the bare products of the same shapes."""
    rows = random_rows([128] * 32, [128] * 32, per_group=1)
    ours = updater(model, folder)
    everything = list(range(32))
    num_responses = 32 * 128
    net = ours.model.model
    layers = [m for layer in decoder_layers(net) for m in layer.modules()]
    shapes = [m.weight.shape for m in layers if isinstance(m, nn.Linear)]
    head = net.get_output_embeddings().weight.shape
    work = [(FLOPS_TOKENS, shape) for shape in shapes] + [(num_responses, head)]
    total = sum(6 * tokens * shape.numel() for tokens, shape in work)
    operands = operands_of(work)
    multiply(work, operands)
    ours.step(rows, everything, NEXT_TO_NOTHING)
    ratios: list[float] = []
    for _ in range(count):
        own = seconds(lambda: ours.step(rows, everything, NEXT_TO_NOTHING))
        peak = total / seconds(lambda: multiply(work, operands))
        print(f"flops: {total / own / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s", flush=True)
        ratios.append(total / own / peak)
    return report("flops", ratios)


Operands = dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]


def operands_of(work: Sequence[tuple[int, torch.Size]]) -> Operands:
    """Return inputs, gradient and weight of every shape, made before the clock runs."""
    found: Operands = {}
    for tokens, (out, inner) in work:
        rows = min(tokens, AT_ONCE)
        found[out, inner] = (
            torch.randn(rows, inner).bfloat16(),
            torch.randn(rows, out).bfloat16(),
            torch.randn(out, inner).bfloat16(),
        )
    return found


def multiply(work: Sequence[tuple[int, torch.Size]], operands: Operands) -> None:
    """Make the products of forward and backward pass."""
    for tokens, (out, inner) in work:
        inputs, gradient, weight = operands[out, inner]
        for _ in range(tokens // len(inputs)):
            _ = inputs @ weight.T
            _ = gradient @ weight
            _ = gradient.T @ inputs


def main() -> int:
    """Run the benches; return 1 if a target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(TARGETS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    given = parser.parse_args()
    if not Path(given.model).is_dir():
        print(f"{given.model} is not there: run `rollflow prepare smollm2`")
        return 2
    is_reached = True
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            run = flops if name == "flops" else None
            is_reached &= (
                run(given.model, folder, given.pairs)
                if run
                else against_the_loop(name, given.model, folder, given.pairs)
            )
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
