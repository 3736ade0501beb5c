"""Replicas that die or hang are replaced, and serve only with the present weights."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.cluster.replica_supervisor import ReplicaSupervisor
from rlcore.errors import ActorUnavailableError, ConfigError, ReplicaDiedError, TransientError
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.health import HealthLimits
from rlcore.rollout.router import Router
from rlcore.testing.replica_process import (
    BREAKS,
    Fault,
    ReplicaProcess,
    TensorSpec,
    start_replica_process,
)
from rlcore.testing.replicas import FakeReplica
from rlcore.types import CallKey, WeightMeta

SPECS: list[TensorSpec] = [("w", "float32", (1000,), None)]
LIMITS = HealthLimits(
    check_every_s=0.1, answer_s=1.0, max_misses=2, start_s=60, max_restarts=3, backoff_s=0.01
)


def key(phase: str) -> CallKey:
    return CallKey(run_id="run", attempt=1, global_step=1, phase=phase)


class Source:
    def __init__(self, path: Path) -> None:
        self.published = None
        self.path, self.version = path, 1

    def publish_weights(self, key: CallKey) -> WeightMeta:
        weight = torch.full((1000,), float(self.version))
        self.published = write_tensors(self.path, [("w", weight)], "float32", self.version)
        return self.published

    def published_weights(self) -> WeightMeta | None:
        return self.published


class Fleet:
    def __init__(self, folder: Path, step_s: float = 0.0, **options) -> None:
        self.folder, self.step_s, self.started = folder, step_s, []
        self.told: list[dict[str, int]] = []
        self.replicas = {name: self.start(name) for name in ("a", "b")}
        self.source = Source(folder / "w")
        self.manager = CheckpointEngineManager(self.source, self.replicas, key=key("update"))
        self.supervisor = ReplicaSupervisor(
            self.manager, self.replicas, key=key, limits=LIMITS, on_change=self.tell,
            **{"start": self.start} | options,
        )  # fmt: skip

    def start(self, name: str) -> ReplicaProcess:
        self.started.append(
            start_replica_process(name, self.folder, SPECS, deadline_s=10.0, step_s=self.step_s)
        )
        return self.started[-1]

    def tell(self, serving) -> None:
        # As a router would: whoever it hears of may get a request now.
        self.told.append({n: r.health()["weight_version"] for n, r in serving.items()})

    def until(self, condition) -> None:
        ends = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < ends, self.told
            time.sleep(0.02)


@pytest.fixture
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("f"))
    yield made
    made.supervisor.stop()
    for replica in made.started:
        replica.kill()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_is_replaced_and_serves_the_present_weights_only(fleet, sent):
    fleet.manager.update_weights(1)
    fleet.supervisor.start()
    os.kill(fleet.replicas["b"].pid, sent)
    fleet.until(lambda: len(fleet.told) == 2)
    assert fleet.told == [{"a": 1}, {"a": 1, "b": 1}]
    new = fleet.supervisor.serving["b"]
    assert new is fleet.manager.replicas["b"] and new.pid != fleet.replicas["b"].pid
    with pytest.raises(ActorUnavailableError):
        fleet.replicas["b"].health()
    fleet.source.version = 2
    assert fleet.manager.update_weights(2)["replicas"] == 2


def test_an_update_that_loses_its_only_replica_succeeds_when_tried_again(fleet):
    fleet.manager.update_weights(1)
    fleet.manager.remove_replicas(["b"])
    fleet.replicas["b"].kill()
    fleet.supervisor._serving.pop("b")  # it watches one replica only
    fleet.supervisor.start()
    fleet.source.version = 2
    fleet.replicas["a"].set_fault(Fault(at="first", action="kill"))
    with pytest.raises(TransientError, match="0 replicas are left"):
        fleet.manager.update_weights(2)
    fleet.until(lambda: fleet.told and "a" in fleet.told[-1])
    assert fleet.manager.update_weights(2) | {"seconds": 0, "gb_per_s": 0} == {
        "version": 2, "bytes": 4000, "replicas": 1, "lost": [], "seconds": 0, "gb_per_s": 0,
    }  # fmt: skip


def test_a_replica_that_cannot_be_replaced_fails_the_run(tmp_path_factory):
    def fails(name: str) -> ReplicaProcess:
        raise TransientError("no room")

    fleet = Fleet(tmp_path_factory.mktemp("f"), start=fails)
    fleet.supervisor.raise_if_failed()
    fleet.replicas["a"].kill()
    fleet.supervisor.check()
    fleet.until(lambda: fleet.supervisor._failure is not None)
    with pytest.raises(ReplicaDiedError, match="a could not be replaced in 3 tries; last: no room"):
        fleet.supervisor.raise_if_failed()
    fleet.supervisor.stop()


def test_a_request_that_breaks_every_replica_ends_the_run_and_is_named(fleet):
    for part, name in enumerate("aba"):
        replica = fleet.supervisor.serving[name]
        with pytest.raises(ActorUnavailableError, match="breaks the engine"):
            asyncio.run(replica.generate(f"bad-{part}", [BREAKS], {"max_tokens": 4, "seed": 1}))
        fleet.supervisor.raise_if_failed()
        fleet.supervisor.check()
        if part < 2:
            fleet.until(lambda: len(fleet.supervisor.serving) == 2)
    with pytest.raises(
        ReplicaDiedError,
        match=r"^a, b, a were lost while request bad ran; the last: a is dead: RuntimeError\(",
    ):
        fleet.supervisor.raise_if_failed()
    assert list(fleet.supervisor.serving) == ["b"]
    assert len(fleet.started) == 4


def test_a_user_error_is_not_tried_again(tmp_path_factory):
    def fails(name: str) -> ReplicaProcess:
        raise ConfigError("no such model")

    fleet = Fleet(tmp_path_factory.mktemp("f"), start=fails)
    fleet.replicas["a"].kill()
    fleet.supervisor.check()
    fleet.until(lambda: fleet.supervisor._failure is not None)
    with pytest.raises(ConfigError, match="no such model"):
        fleet.supervisor.raise_if_failed()
    fleet.supervisor.stop()


def test_an_error_that_nobody_foresaw_ends_the_run_not_the_restart_alone(tmp_path_factory):
    def fails(name: str) -> ReplicaProcess:
        raise KeyError("cores")

    fleet = Fleet(tmp_path_factory.mktemp("f"), start=fails)
    fleet.replicas["a"].kill()
    fleet.supervisor.check()
    fleet.until(lambda: fleet.supervisor._failure is not None)
    with pytest.raises(KeyError, match="cores"):
        fleet.supervisor.raise_if_failed()
    fleet.supervisor.stop()


def test_an_error_that_nobody_foresaw_ends_the_run_not_the_watch_alone(tmp_path):
    class Odd(FakeReplica):
        def health(self, deadline_s: float) -> dict[str, Any]:
            raise AssertionError("an answer that cannot be read")

        def wait_ready(self, deadline_s: float) -> None:
            pass

    manager = CheckpointEngineManager(Source(tmp_path / "w"), {})
    supervisor = ReplicaSupervisor(
        manager, {"a": Odd()}, start=lambda _: Odd(), key=key, limits=LIMITS
    )
    supervisor.start()
    ends = time.monotonic() + 20
    while supervisor._failure is None and time.monotonic() < ends:
        time.sleep(0.02)
    with pytest.raises(AssertionError, match="cannot be read"):
        supervisor.raise_if_failed()
    supervisor.stop()


async def until_true(condition) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


def test_one_that_is_lost_while_the_trainer_works_comes_back_at_rest_like_its_peer(
    tmp_path_factory,
):
    """The calls of mode colocate_async, with requests that go on after the update."""
    fleet = Fleet(tmp_path_factory.mktemp("f"), step_s=0.01)
    manager = fleet.manager
    params = {"max_tokens": 60, "ignore_eos": True}

    async def main():
        router = Router(dict(fleet.replicas), load_cap=0)
        loop = asyncio.get_running_loop()
        fleet.supervisor._on_change = lambda serving: loop.call_soon_threadsafe(
            router.replace_all, serving
        )
        client = LLMServerClient(router, seed=0)
        running = [
            asyncio.create_task(client.generate(f"r{i}", [5], {**params, "seed": 1000 * i}))
            for i in range(8)
        ]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(manager.abort_replicas)
        await asyncio.to_thread(manager.sleep_replicas)
        fleet.replicas["b"].kill()
        await until_true(lambda: fleet.supervisor.serving.get("b") not in (None, old))
        new = fleet.supervisor.serving["b"]
        early = asyncio.create_task(new.generate("early-0", [5], {**params, "seed": 7}))
        await until_true(lambda: new.health()["parked"] > 0)
        await asyncio.sleep(0.3)
        state = await asyncio.to_thread(new.health)
        assert (state["state"], state["in_flight"], state["num_tokens"]) == ("asleep", 0, 0)
        fleet.source.version = 2
        await asyncio.to_thread(manager.update_weights, 2)
        await asyncio.to_thread(manager.resume_generation_replicas)
        return await early, await asyncio.gather(*running)

    try:
        manager.update_weights(1)
        old = fleet.replicas["b"]
        fleet.supervisor.start()
        early, outputs = asyncio.run(main())
    finally:
        fleet.supervisor.stop()
        for replica in fleet.started:
            replica.kill()
    assert (early.token_ids, early.weight_versions) == (list(range(7, 67)), [2] * 60)
    for i, output in enumerate(outputs):
        assert output.token_ids == [1000 * i + position for position in range(60)]
        assert output.weight_versions == sorted(output.weight_versions)
    assert {version for o in outputs for version in o.weight_versions} == {1, 2}
