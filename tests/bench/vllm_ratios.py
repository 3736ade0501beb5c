"""The engine vllm against vLLM itself: `make bench-vllm`, in the environment that has vLLM.

    .venv-vllm/bin/python tests/bench/vllm_ratios.py [--pairs 5] [--only serving|update|engines]

serving  64 requests through client, router and server against AsyncLLM given the same requests:
         tokens per second, at least 0.93
update   a whole weight update (cast, publish, receive, checksum, commit) against vLLM's own
         weight-transfer calls alone, on bytes that its worker has received already: at least 0.8
engines  the embedded engine against vLLM, same CPU, model and work: reported
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM
from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.engine import EngineRequest, EngineSpec
from rlcore.rollout.router import Router
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.rollout.server import LLMServer
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.rollout.vllm_engine import VllmEngine, _vllm_params
from rlcore.types import CallKey, TokenOutput, WeightMeta

MODEL = "models/smollm2-135m-instruct"
NUM_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 20, 128
MAX_LEN = PROMPT_TOKENS + NEW_TOKENS
CALL_S = 600.0
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")


def spec() -> EngineSpec:
    """Return the engine of all parts."""
    return EngineSpec(
        name="vllm",
        model_path=MODEL,
        dtype="bfloat16",
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=MAX_LEN,
        num_threads=torch.get_num_threads(),
    )


def prompts_of(pair: int) -> list[list[int]]:
    """Return prompts that no cache has seen."""
    generator = torch.Generator().manual_seed(pair)
    return torch.randint(5, 40_000, (NUM_SEQUENCES, PROMPT_TOKENS), generator=generator).tolist()


def requests_of(pair: int) -> list[EngineRequest]:
    """Return the pair's requests."""
    return [
        EngineRequest(
            request_id=f"{pair}-{time.monotonic_ns()}-{i}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=NEW_TOKENS, seed=i, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts_of(pair))
    ]


def compare(name: str, ours: Callable, bare: Callable, pairs: int, target: float | None) -> bool:
    """Interleave pairs after one of each; print bare / ours, the share reached."""
    ours(0), bare(0)
    ratios = []
    for pair in range(1, pairs + 1):
        turns = (ours, bare) if pair % 2 else (bare, ours)
        seconds = {}
        for index, turn in enumerate(turns):
            began = time.perf_counter()
            turn(10 * pair + index)
            seconds[turn] = time.perf_counter() - began
        ratios.append(seconds[bare] / seconds[ours])
        print(f"  ours {seconds[ours]:.2f} s, bare {seconds[bare]:.2f} s", flush=True)
    median = statistics.median(ratios)
    wanted = "reported" if target is None else f"at least {target}"
    print(
        f"{name}: {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs; {wanted})",
        flush=True,
    )
    return target is None or median >= target


class Served:
    """An engine in a server, with router and client before it; called from this thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.engine: VllmEngine | None = None
        self.server = LLMServer(self._make, run_id="run")
        self.call(self.server.wait_ready(600))
        self.client = LLMServerClient(Router({"replica": self.server}))

    def _make(self) -> VllmEngine:
        self.engine = VllmEngine(spec())
        return self.engine

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.server, name)
        return lambda *args: self.call(method(*args))

    def generate(self, pair: int) -> None:
        """Serve the pair's requests."""

        async def all_of_them() -> list[TokenOutput]:
            params = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
            return await asyncio.gather(
                *(
                    self.client.generate(f"s{pair}-{i}", prompt, {**params, "seed": i})
                    for i, prompt in enumerate(prompts_of(pair))
                )
            )

        outputs = self.call(all_of_them())
        assert {len(output.token_ids) for output in outputs} == {NEW_TOKENS}

    def generate_bare(self, pair: int) -> None:
        """Give the requests to AsyncLLM, in the loop that it runs in."""
        engine = self.engine
        assert engine is not None

        async def one(request: EngineRequest) -> int:
            params = _vllm_params(request, ())
            count = 0
            stream = engine._llm.generate(
                tokens_input(request.prompt_ids), params, request.request_id
            )
            async for part in stream:
                count += len(part.outputs[0].token_ids)
            return count

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*(one(request) for request in requests_of(pair)))

        assert set(engine._call(all_of_them())) == {NEW_TOKENS}


class Trainer:
    """float32 weights that are published as bfloat16."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.path, self.version = folder / "w", 0

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write them into the segment."""
        return write_tensors(self.path, self.state.items(), "bfloat16", self.version)


def bench_update(served: Served, pairs: int) -> bool:
    """A whole update against vLLM's own calls."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench") as folder:
        trainer = Trainer(Path(folder))
        manager = CheckpointEngineManager(
            trainer, {"replica": served}, backend="shm",
            settings=TransferSettings(bucket_bytes=16 << 20), key=KEY,
        )  # fmt: skip
        engine = served.engine
        assert engine is not None

        def ours(_: int) -> None:
            trainer.version += 1
            manager.update_weights(trainer.version)

        def bare(_: int) -> None:
            engine._call(engine._load(trainer.version))

        return compare("whole update to vLLM", ours, bare, pairs, 0.8)


def bench_engines(served: Served, pairs: int) -> bool:
    """The embedded engine against vLLM's."""
    threads = torch.get_num_threads()
    embedded = TransformersEngine(MODEL, "bfloat16", NUM_SEQUENCES, MAX_LEN, threads)

    def ours(pair: int) -> None:
        for request in requests_of(pair):
            embedded.add(request)
        finished: list[Any] = []
        while len(finished) < NUM_SEQUENCES:
            finished += embedded.step()

    return compare("embedded engine against vLLM", ours, served.generate_bare, pairs, None)


def main() -> int:
    """Print the ratios; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=["serving", "update", "engines"])
    options = parser.parse_args()
    served = Served()
    parts: dict[str, Callable[[], bool]] = {
        "serving": lambda: compare(
            "client, router and server against AsyncLLM",
            served.generate, served.generate_bare, options.pairs, 0.93,
        ),
        "update": lambda: bench_update(served, options.pairs),
        "engines": lambda: bench_engines(served, options.pairs),
    }  # fmt: skip
    met = [part() for name, part in parts.items() if options.only in (None, name)]
    assert served.engine is not None
    served.engine.close()
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
