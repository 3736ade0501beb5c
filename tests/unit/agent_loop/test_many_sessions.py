"""A thousand sessions at once, one of them bad, with real reward processes."""

import asyncio
from dataclasses import replace

from rlcore.agent_loop.session import SessionRunner
from rlcore.data.dataset import PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.reward.loop import RewardLoopManager
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.testing.rollout import CountingReplica

HANGS_ONCE = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["bad"]:
        re.fullmatch("(a*)*b", "a" * 64)
    return float(len(solution_str))
"""


def test_a_thousand_sessions_with_one_bad(make_config, tmp_path):
    path = tmp_path / "hangs_once.py"
    path.write_text(HANGS_ONCE)
    config = make_config(reward__custom_reward_function__path=str(path), reward__timeout=1.0)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    dataset = load_dataset(config, "train", tokenizer)
    [spec] = make_specs(
        dataset, PromptOrder(num_rows=len(dataset), batch_size=4, shuffle=False, seed=0),
        start=0, count=1, run_id="run", partition_id="run/train", global_step=1, num_sessions=1,
    )  # fmt: skip
    client = LLMServerClient(Router({"replica": CountingReplica(num_tokens=5)}), seed=0)
    runner = SessionRunner(config, client, tokenizer, RewardLoopManager(config), [2])

    async def run():
        await runner.start()
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                *(
                    runner.run(
                        replace(spec, fields={**spec.fields, "extra_info": {"bad": i == 137}}), i
                    )
                    for i in range(1000)
                )
            )
        await runner.close()
        return results

    results = asyncio.run(run())
    failed = [result.record for result in results if result.record.is_failed]
    assert [(record.session_id, record.error_type) for record in failed] == [
        (137, "RewardTimeoutError")
    ]
    assert {result.record.reward for result in results if not result.record.is_failed} == {4.0}
