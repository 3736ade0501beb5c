"""A replica in a Ray actor: generation, control, weights, cancelling, death."""

import asyncio
import os
import signal

import pytest
import torch

from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.cluster.llm_server import ReplicaClient, start_replica
from rlcore.errors import ActorUnavailableError, ConfigError, FencedError, WeightSyncError
from rlcore.rollout.engine import EngineSpec
from rlcore.testing.tiny_model import build_tiny_model
from rlcore.types import CallKey
from rlcore.user_code import load_user_modules

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path, num_layers=2, width=64)
    return path


def _start(folder, name):
    spec = EngineSpec(
        name="transformers", model_path=str(folder), dtype="float32", max_num_seqs=16,
        max_model_len=1024, num_threads=1,
    )  # fmt: skip
    return start_replica(spec, run_id="r", attempt=1, name=name)


@pytest.fixture(scope="module")
def replica(ray_session, folder):
    client = _start(folder, "replica-0")
    client.wait_ready(120)
    yield client
    client.kill()


def _key(step, **more):
    return CallKey(run_id="r", attempt=1, global_step=step, phase="update_weights", **more)


def _params(max_tokens, **more):
    return {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **more}


async def _until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.02)


def test_generation_control_and_weights(replica, folder, tmp_path):
    async def generate(name, count, **more):
        return await replica.generate(name, [5, 6, 7], _params(count, **more))

    async def main():
        many = await asyncio.gather(*(generate(f"q{i}", 8, seed=i) for i in range(40)))
        assert all(len(o.token_ids) == 8 and o.weight_versions == [0] * 8 for o in many)
        # The client object is no more than names and deadlines: it pickles.
        long = asyncio.create_task(generate("long", 900))
        await _until(lambda: replica.health()["in_flight"] == 1)
        assert (await replica.partial("long")) is not None
        assert replica.abort(_key(1)) == 1
        assert (await long).stop_reason == "aborted"
        replica.resume(_key(1))

        before = await generate("b", 8)
        replica.sleep(_key(2))
        assert replica.health()["state"] == "asleep"
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        meta = write_tensors(tmp_path / "w", model.state_dict().items(), "float32", 3)
        replica.prepare_weights(_key(2), 3)
        reply = replica.load_weights(_key(2), meta)
        assert reply == {"version": 3, "num_bytes": meta.num_bytes, "checksum": meta.checksum}
        replica.commit_weights(_key(2), 3)
        after = await generate("a", 8)
        assert after.token_ids == before.token_ids
        assert after.weight_versions == [3] * 8
        replica.wake_up(_key(2))
        assert replica.health()["state"] == "ready"

    asyncio.run(main())


def test_errors_arrive_as_they_were_raised(replica):
    with pytest.raises(ConfigError, match="exceed max_model_len 1024"):
        asyncio.run(replica.generate("x", [5], _params(2000)))
    with pytest.raises(WeightSyncError, match="prepared is none"):
        replica.commit_weights(_key(3), 99)
    with pytest.raises(FencedError, match="run r"):
        replica.pause(CallKey(run_id="other", attempt=1, global_step=1), keep=True)


def test_cancelling_the_caller_ends_the_request(replica):
    async def main():
        task = asyncio.create_task(replica.generate("gone", [5], _params(1000)))
        await _until(lambda: replica.health()["in_flight"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: replica.health()["in_flight"] == 0)

    asyncio.run(main())


def test_a_killed_replica_is_unavailable(ray_session, folder):
    client = _start(folder, "victim")
    client.wait_ready(120)

    async def main():
        task = asyncio.create_task(client.generate("a", [5], _params(1000)))
        await _until(lambda: client.health()["in_flight"] == 1)
        os.kill(client.health()["pid"], signal.SIGKILL)
        with pytest.raises(ActorUnavailableError, match="victim"):
            await task
        with pytest.raises(ActorUnavailableError, match="victim"):
            client.resume(_key(1))

    asyncio.run(main())


def test_a_model_that_is_missing_is_a_user_error(ray_session, tmp_path):
    client: ReplicaClient = _start(tmp_path, "missing")
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        client.wait_ready(120)
    client.kill()


BREAKS = """
from rlcore.rollout.engine import ENGINES
from rlcore.testing.scripted_engine import ScriptedEngine


@ENGINES.register("breaks")
def breaks(spec):
    return ScriptedEngine(fail_at_step=1)
"""


def test_a_replica_whose_engine_broke_lives_and_says_why(ray_session, tmp_path):
    path = tmp_path / "breaks.py"
    path.write_text(BREAKS)
    spec = EngineSpec(
        name="breaks", model_path="", dtype="float32", max_num_seqs=16, max_model_len=64,
        num_threads=1,
    )  # fmt: skip
    load_user_modules([str(path)])  # as the driver of a run has
    client = start_replica(spec, run_id="r", attempt=1, name="broken", user_modules=[str(path)])
    try:
        client.wait_ready(120)
        with pytest.raises(ActorUnavailableError, match="scripted failure"):
            asyncio.run(client.generate("q", [1], _params(4)))
        health = client.health()
        assert (health["state"], health["error"]) == ("dead", "RuntimeError('scripted failure')")
    finally:
        client.kill()
