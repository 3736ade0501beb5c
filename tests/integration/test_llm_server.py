"""A replica in a Ray actor: generation, control, weights, cancelling, death; for each engine.

The vllm half needs vLLM: `make test-vllm`.
"""

import asyncio
import os
import signal
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.cluster.llm_server import ReplicaClient, start_replica
from rlcore.errors import ActorUnavailableError, ConfigError, FencedError, WeightSyncError
from rlcore.rollout.engine import EngineSpec
from rlcore.testing.tiny_model import build_tiny_model
from rlcore.types import CallKey
from rlcore.user_code import load_user_modules

pytestmark = pytest.mark.integration
KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
SLOTS = 16


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path, num_layers=2, spread=0.12)
    return path


def _start(kind, folder, name):
    spec = EngineSpec(
        name=kind, model_path=str(folder), dtype="float32", max_num_seqs=SLOTS,
        max_model_len=1024, num_threads=1,
    )  # fmt: skip
    return start_replica(spec, run_id="r", attempt=1, name=name)


@pytest.fixture(scope="module")
def replica(ray_session, kind, folder):
    client = _start(kind, folder, "replica-0")
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
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        meta = write_tensors(tmp_path / "w", list(model.state_dict().items()), "float32", 3)
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


def _publish(folder, path, version, factor):
    """Publish the folder's weights, scaled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model, write_tensors(path, list(model.state_dict().items()), "float32", version)


def _recomputed(model, prompt, token_ids):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


async def _all_busy(replica, names):
    """Wait until requests are in all slots and the first has tokens."""
    await _until(lambda: replica.health()["in_flight"] == len(names))
    async with asyncio.timeout(30):
        while not ((p := await replica.partial(names[0])) and len(p.token_ids) > 3):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_update_while_64_requests_run_loses_none_and_serves_no_old_weights(
    replica, folder, tmp_path, mode
):
    version = {"keep": 11, "abort": 12}[mode]
    key = _key(version)
    prompt = [5, 6, 7]
    old = replica.health()["weight_version"]
    names = [f"{mode}{i}" for i in range(4 * SLOTS)]

    async def main():
        tasks = [
            asyncio.create_task(replica.generate(n, prompt, _params(300, seed=i)))
            for i, n in enumerate(names)
        ]
        await _all_busy(replica, names)
        began = time.monotonic()
        if mode == "abort":
            assert replica.abort(key) == len(names)
            aborted = await asyncio.gather(*tasks)
            assert time.monotonic() - began < 10
            assert {o.stop_reason for o in aborted} == {"aborted"}
            assert aborted[0].token_ids
        replica.prepare_weights(key, version)
        late = asyncio.create_task(replica.generate("late", prompt, _params(8)))
        new, meta = _publish(folder, tmp_path / "w", version, 1.1)
        await _until(lambda: replica.health()["parked"] == 1)
        count = replica.health()["num_tokens"]
        assert replica.load_weights(key, meta)["checksum"] == meta.checksum
        await asyncio.sleep(0.2)
        assert replica.health()["num_tokens"] == count
        assert not late.done()
        replica.commit_weights(key, version)
        if mode == "abort":  # each goes on from what its client holds
            replica.resume(key)
            held = aborted
            rest = await asyncio.gather(
                *(
                    replica.generate(
                        f"{n}-1", prompt + o.token_ids,
                        _params(300 - len(o.token_ids), seed=i, position=len(o.token_ids)),
                    )
                    for i, (n, o) in enumerate(zip(names, held, strict=True))
                )
            )  # fmt: skip
            outputs = [
                (h.token_ids + r.token_ids, h.weight_versions + r.weight_versions)
                for h, r in zip(held, rest, strict=True)
            ]
        else:
            outputs = [(o.token_ids, o.weight_versions) for o in await asyncio.gather(*tasks)]
        after = await late
        return new, outputs, after

    new, outputs, after = asyncio.run(main())
    assert len(outputs) == len(names)
    for token_ids, versions in outputs:
        assert len(token_ids) == len(versions) == 300
        assert versions == sorted(versions)
        assert set(versions) <= {old, version}
    # The first was running; the last waited for a slot and began with the new weights.
    assert set(outputs[0][1]) == {old, version}
    assert set(outputs[-1][1]) == {version}
    assert after.weight_versions == [version] * 8
    expected = _recomputed(new, prompt, after.token_ids)
    assert (expected - torch.tensor(after.log_probs)).abs().max() < 1e-4


def test_a_pause_that_keeps_freezes_and_one_that_does_not_drains(replica):
    async def main():
        task = asyncio.create_task(replica.generate("frozen", [5, 6], _params(400)))
        await _all_busy(replica, ["frozen"])
        replica.pause(_key(20), keep=True)
        seen = (await replica.partial("frozen")).token_ids
        await asyncio.sleep(0.3)
        assert (await replica.partial("frozen")).token_ids == seen
        assert replica.health()["state"] == "paused"
        replica.resume(_key(20))
        await asyncio.to_thread(replica.pause, _key(21), keep=False)
        output = await task
        assert (len(output.token_ids), output.stop_reason) == (400, "length")
        assert output.token_ids[: len(seen)] == seen
        replica.resume(_key(21))

    asyncio.run(main())


def test_control_calls_are_answered_while_many_requests_wait(replica):
    async def main():
        names = [f"w{i}" for i in range(500)]
        tasks = [
            asyncio.create_task(replica.generate(n, [5], _params(1000, seed=i)))
            for i, n in enumerate(names)
        ]
        await _until(lambda: replica.health()["in_flight"] == 500)
        began = time.monotonic()
        replica.pause(_key(22), keep=True)
        took = time.monotonic() - began
        assert replica.abort(_key(22)) == 500
        assert {o.stop_reason for o in await asyncio.gather(*tasks)} == {"aborted"}
        replica.resume(_key(22))
        assert took < 10
        assert len((await replica.generate("next", [5], _params(4))).token_ids) == 4

    asyncio.run(main())


def test_errors_arrive_as_they_were_raised(replica):
    with pytest.raises(ConfigError, match="exceed max_model_len 1024"):
        asyncio.run(replica.generate("x", [5], _params(2000)))
    with pytest.raises(WeightSyncError, match="prepared is none"):
        replica.commit_weights(_key(30), 99)
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


def test_a_killed_replica_is_unavailable_and_leaves_no_process(ray_session, kind, folder):
    client = _start(kind, folder, "victim")
    client.wait_ready(120)
    children = psutil.Process(client.health()["pid"]).children(recursive=True)

    async def main():
        task = asyncio.create_task(client.generate("a", [5], _params(1000)))
        await _until(lambda: client.health()["in_flight"] == 1)
        os.kill(client.health()["pid"], signal.SIGKILL)
        with pytest.raises(ActorUnavailableError, match="victim"):
            await task
        with pytest.raises(ActorUnavailableError, match="victim"):
            client.resume(_key(1))

    asyncio.run(main())
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.vllm
def test_a_replica_whose_engine_core_died_says_so(ray_session, folder):
    client = _start("vllm", folder, "coreless")
    client.wait_ready(120)
    processes = psutil.Process(client.health()["pid"]).children(recursive=True)
    (core,) = (p for p in processes if "EngineCor" in p.name())

    async def main():
        task = asyncio.create_task(client.generate("a", [5], _params(1000)))
        await _until(lambda: client.health()["in_flight"] == 1)
        core.kill()
        with pytest.raises(ActorUnavailableError, match="coreless is dead"):
            await task

    try:
        asyncio.run(main())
        assert client.health()["state"] == "dead"
    finally:
        client.kill()


def test_a_model_that_is_missing_is_a_user_error(ray_session, kind, tmp_path):
    client: ReplicaClient = _start(kind, tmp_path, "missing")
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
