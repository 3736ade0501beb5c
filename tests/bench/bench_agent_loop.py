"""Agent loop and reward on top of the engine, and the bookkeeping of late turns.

    python tests/bench/bench_agent_loop.py [--pairs 5] [--sessions 256] [--tokens 256] [--only ...]

overhead: sessions through agent loop, client, router and reward processes against the same requests
given to the engine's server bare; distinct prompts, EOS ignored, same lengths; interleaved pairs.
turns: time that one session's code takes between two turns of equal length, turns 120 to 128
against 4 to 12, with a model that costs nothing.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from rlcore.agent_loop.session import SessionRunner
from rlcore.config import load_config
from rlcore.data.tokenizer import load_tokenizer
from rlcore.reward.loop import RewardLoopManager
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.rollout.server import LLMServer
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.testing.rewards import InlineRewards
from rlcore.testing.tiny_run import tiny_config
from rlcore.types import PromptSpec, TokenOutput

SMOLLM2 = "models/smollm2-135m-instruct"
MAX_OVERHEAD, MAX_TURN_RATIO = 1.05, 2.0
SLOTS = 64
TOOL_TURNS = 130


class FixedLength:
    """The server with EOS ignored, so that both sides sample the same number of tokens."""

    def __init__(self, server):
        self._server = server

    async def generate(self, request_id, prompt_ids, sampling_params):
        params = {**sampling_params, "ignore_eos": True, "stop_token_ids": []}
        return await self._server.generate(request_id, prompt_ids, params)

    async def partial(self, request_id):
        return await self._server.partial(request_id)


def spec_of(pair: int, index: int) -> PromptSpec:
    text = f"Pair {pair}: what is {index} + {index * 7 % 97}? Write the answer at the end."
    return PromptSpec(
        uid=f"{pair}-{index}", partition_id="bench/train", global_step=1, epoch=pair, index=index,
        raw_prompt=[{"role": "user", "content": text}], num_sessions=1,
        fields={"data_source": "exact_match", "reward_model": {"ground_truth": "1"},
                "extra_info": {"extraction": "last_integer"}},
    )  # fmt: skip


async def overhead(options) -> bool:
    config = load_config(
        "grpo-smollm2",
        [f"data.max_response_length={options.tokens}", f"actor_rollout_ref.model.path={SMOLLM2}"],
    )
    tokenizer = load_tokenizer(SMOLLM2)
    server = LLMServer(
        lambda: TransformersEngine(
            SMOLLM2, "bfloat16", SLOTS, 128 + options.tokens, torch.get_num_threads()
        ),
        run_id="bench",
    )
    await server.wait_ready(300)
    replica = FixedLength(server)
    rewards = RewardLoopManager(config)
    client = LLMServerClient(Router({"replica": replica}), seed=0)
    runner = SessionRunner(config, client, tokenizer, rewards, [tokenizer.eos_token_id])
    await runner.start()

    async def ours(specs):
        begin = time.perf_counter()
        results = await asyncio.gather(*(runner.run(spec, 0) for spec in specs))
        seconds = time.perf_counter() - begin
        assert all(len(r.rows[0]["responses"]) == options.tokens for r in results)
        return seconds

    async def bare(specs):
        prompts = [
            tokenizer.apply_chat_template(
                spec.raw_prompt, add_generation_prompt=True, return_dict=False
            )
            for spec in specs
        ]
        begin = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                replica.generate(
                    f"bare-{spec.uid}", prompt, {"max_tokens": options.tokens, "seed": spec.index}
                )
                for spec, prompt in zip(specs, prompts, strict=True)
            )
        )
        seconds = time.perf_counter() - begin
        assert all(len(output.token_ids) == options.tokens for output in outputs)
        return seconds

    await ours([spec_of(-1, i) for i in range(SLOTS)])
    ratios = []
    for pair in range(options.pairs):
        specs = [spec_of(pair, i) for i in range(options.sessions)]
        if pair % 2:
            a, b = await ours(specs), await bare(specs)
        else:
            b, a = await bare(specs), await ours(specs)
        ratios.append(a / b)
        print(f"overhead pair {pair}: {a:.2f} s against {b:.2f} s, {ratios[-1]:.3f}", flush=True)
    await runner.close()
    await server.close()
    return verdict(
        f"overhead, {options.sessions} sessions of {options.tokens} tokens", ratios, MAX_OVERHEAD
    )


class TimedReplica:
    """Calls a tool in every turn with the same text; notes the time between its turns."""

    def __init__(self, tokenizer, end):
        call = '{"name": "calculator", "arguments": {"expression": 1}}'
        turn = f"Now.\n<tool_call>\n{call}\n</tool_call>"
        self._ids = [*tokenizer(turn, add_special_tokens=False)["input_ids"], end]
        self.gaps = []
        self._answered = None

    async def generate(self, request_id, prompt_ids, sampling_params):
        now = time.perf_counter()
        if self._answered is not None:
            self.gaps.append(now - self._answered)
        ids = list(self._ids)
        self._answered = time.perf_counter()
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), weight_versions=[0] * len(ids),
            stop_reason="completed",
        )  # fmt: skip

    async def partial(self, request_id):
        return None


TOOL = """
from rlcore.tools import function_tool

@function_tool
async def calculator(expression: int) -> str:
    '''Answers always the same.'''
    return "12"
"""


async def turns(options) -> bool:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tool.py"
        path.write_text(TOOL)
        config = tiny_config(
            Path(folder),
            {
                "data.max_prompt_length": 1000, "data.max_response_length": 30_000,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 31_000,
                "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
                "actor_rollout_ref.rollout.multi_turn.function_tool_path": str(path),
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": TOOL_TURNS,
            },
        )  # fmt: skip
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        for pair in range(3 * options.pairs):
            replica = TimedReplica(tokenizer, 2)
            client = LLMServerClient(Router({"replica": replica}), seed=pair)
            runner = SessionRunner(
                config, client, tokenizer, InlineRewards.from_config(config), [2]
            )
            spec = spec_of(pair, 0)
            spec.fields["data_source"] = "exact_match"
            result = await runner.run(spec, 0)
            await runner.close()
            assert result.record.num_turns == 2 * TOOL_TURNS, result.record.error_message
            early, late = replica.gaps[4:12], replica.gaps[120:128]
            ratios.append(statistics.median(late) / statistics.median(early))
    return verdict("bookkeeping, turn 128 against turn 8", ratios, MAX_TURN_RATIO)


def verdict(what: str, ratios: list[float], limit: float) -> bool:
    median = statistics.median(ratios)
    print(
        f"{what}: median ratio {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, "
        f"{len(ratios)} pairs), at most {limit}: {'reached' if median <= limit else 'MISSED'}"
    )
    return median <= limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", choices=["overhead", "turns"])
    options = parser.parse_args()
    reached = []
    if options.only != "overhead":
        reached.append(asyncio.run(turns(options)))
    if options.only != "turns":
        if not Path(SMOLLM2, "config.json").exists():
            sys.exit(f"{SMOLLM2} is missing: `make model` makes it")
        reached.append(asyncio.run(overhead(options)))
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
