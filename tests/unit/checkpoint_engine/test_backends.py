"""One contract for every backend that carries weights between processes."""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.errors import (
    ActorUnavailableError,
    RLCoreError,
    TransientError,
    WeightTransferError,
)
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.router import Router
from rlcore.rollout.server import ServerDeadlines
from rlcore.testing.replica_process import (
    PROCESSES,
    Fault,
    ReplicaProcess,
    start_replica_process,
)
from rlcore.testing.weight_source import SPECS, WeightSource, tensors, update_to_2
from rlcore.types import CallKey, WeightMeta

# The last two are `nccl` and `kimi_ckpt_engine` with a CPU in place of GPUs.
BACKENDS = ["naive", "shm", "gloo", "mooncake", "nccl_on_cpu", "kimi_on_cpu"]
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")
SETTINGS = TransferSettings(bucket_bytes=4 << 20, bucket_deadline_s=8.0)


@functools.cache
def expected(version: int) -> dict[str, bytes]:
    flat = {n: t.flatten().view(torch.uint8) for n, t in tensors(version)}
    return {name: tensor.numpy().tobytes() for name, tensor in flat.items()}


class Cell:
    """Two replicas, a trainer and a manager."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.started: list[ReplicaProcess] = []
        self.source = WeightSource(folder)
        self.replicas = {name: self.start(name) for name in ("a", "b")}
        self.manager = self.new_manager(self.replicas)

    def start(self, name: str, **options: float) -> ReplicaProcess:
        deadlines = ServerDeadlines(control_s=10.0, load_s=20.0)
        replica = start_replica_process(name, self.folder, SPECS, deadlines=deadlines, **options)
        self.started.append(replica)
        return replica

    def new_manager(self, replicas, **options) -> CheckpointEngineManager:
        options = {"backend": self.backend, "settings": SETTINGS, "key": KEY} | options
        return CheckpointEngineManager(self.source, replicas, **options)

    def assert_serves(self, version: int, *names: str) -> None:
        want = expected(version)
        for name in names or self.replicas:
            replica = self.replicas[name]
            health = replica.health()
            assert (health["weight_version"], health["loading_version"]) == (version, None)
            assert replica.weights() == want


@pytest.fixture(params=BACKENDS)
def cell(request, tmp_path_factory) -> Iterator[Cell]:
    made = Cell(request.param, tmp_path_factory.mktemp("c"))
    yield made
    for replica in made.started:
        replica.kill()


def again(manager: CheckpointEngineManager, try_number: int = 2) -> CheckpointEngineManager:
    key = CallKey(
        run_id="run", attempt=1, global_step=1, phase="update_weights", try_number=try_number
    )
    return manager.with_key(key)


def test_every_tensor_arrives_bit_exact_and_again(cell):
    for version in (1, 2, 3):
        cell.source.version = version
        result = cell.manager.update_weights(version)
        assert (result["version"], result["replicas"], result["lost"]) == (version, 2, [])
        cell.assert_serves(version)
    assert cell.manager.update_weights(3)["version"] == 3, "the same state again"
    cell.assert_serves(3)


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_load_error_leaves_the_old_weights_and_the_retry_succeeds(cell, at):
    cell.manager.update_weights(1)
    cell.source.version = 2
    cell.replicas["b"].set_fault(Fault(at=at, action="load_error"))
    with pytest.raises(WeightTransferError, match="cannot be loaded: bucket"):
        cell.manager.update_weights(2)
    cell.assert_serves(1)
    again(cell.manager).update_weights(2)
    cell.assert_serves(2)


def test_a_refusal_ends_the_update_for_all(cell):
    cell.manager.update_weights(1)
    cell.source.version = 2
    cell.replicas["a"].set_fault(Fault(at="middle", action="refuse"))
    with pytest.raises(WeightTransferError, match="refused, as asked"):
        cell.manager.update_weights(2)
    cell.assert_serves(1)
    again(cell.manager).update_weights(2)
    cell.assert_serves(2)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_lost_receiver_is_dead_and_a_new_one_joins_with_the_present_weights(cell, action):
    cell.manager.update_weights(1)
    cell.source.version = 2
    cell.replicas["b"].deadline_s = 5.0
    cell.manager.replicas["b"] = cell.replicas["b"]
    cell.replicas["b"].set_fault(Fault(at="middle", action=action))
    result = cell.manager.update_weights(2)
    assert (result["replicas"], result["lost"]) == (1, ["b"])
    cell.assert_serves(2, "a")
    with pytest.raises(ActorUnavailableError, match="the process is gone"):
        cell.replicas["b"].health()
    cell.replicas["b"] = cell.start("b")
    assert cell.manager.add_replicas({"b": cell.replicas["b"]}) == 2
    cell.assert_serves(2)
    cell.source.version = 3
    assert cell.manager.update_weights(3)["replicas"] == 2
    cell.assert_serves(3)


def test_without_enough_receivers_nothing_is_committed(cell):
    manager = cell.new_manager(cell.replicas, min_replicas=2)
    manager.update_weights(1)
    cell.source.version = 2
    cell.replicas["b"].set_fault(Fault(at="middle", action="kill"))
    with pytest.raises(TransientError, match="1 replicas are left, 2 are needed"):
        manager.update_weights(2)
    cell.assert_serves(1, "a")
    cell.replicas["b"] = cell.start("b")
    manager.replicas["b"] = cell.replicas["b"]  # as whoever restarts it does
    again(manager).update_weights(2)
    cell.assert_serves(2)


def test_a_killed_sender_leaves_the_old_weights_and_the_retry_succeeds(cell):
    cell.manager.update_weights(1)
    cell.source.version = 2
    cell.replicas["b"].set_fault(Fault(at="middle", action="kill_sender", spare=os.getpid()))
    driver = PROCESSES.Process(target=update_to_2, args=(cell.manager,))
    driver.start()
    driver.join(120)
    # Not `!= 0`: while it runs on, the fault is still to come, and would kill these tests.
    assert driver.exitcode not in (None, 0)
    for replica in cell.replicas.values():
        assert replica.health()["weight_version"] == 1
        assert replica.weights() == expected(1)
    again(cell.manager).update_weights(2)
    cell.assert_serves(2)


def test_a_hung_sender_ends_in_an_error_and_the_retry_succeeds(cell):
    cell.manager.update_weights(1)
    cell.source.version = 2
    for replica in cell.replicas.values():
        replica.deadline_s = 60.0  # they tell of the sender; neither is to be taken for lost
    cell.replicas["b"].set_fault(Fault(at="first", action="stop_sender", spare=os.getpid()))
    driver = PROCESSES.Process(target=update_to_2, args=(cell.manager,))
    driver.start()
    ends = time.monotonic() + 120
    while driver.is_alive() and time.monotonic() < ends:
        time.sleep(0.1)
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED:
                driver.kill()  # as the phase's deadline does
    driver.join(5)
    assert driver.exitcode not in (None, 0)
    again(cell.manager).update_weights(2)
    cell.assert_serves(2)


def test_a_wrong_checksum_is_no_commit(cell):
    cell.manager.update_weights(1)

    class Damaged(WeightSource):
        def publish_weights(self, key: CallKey) -> WeightMeta:
            meta = super().publish_weights(key)
            with self.path.open("r+b") as file:
                file.seek(meta.num_bytes - 100)
                file.write(b"\x55")
            return meta

    damaged = Damaged(cell.folder)
    damaged.version = 2
    cell.manager.training = damaged
    with pytest.raises(WeightTransferError, match="overwritten or damaged"):
        cell.manager.update_weights(2)
    cell.assert_serves(1)
    cell.manager.training = cell.source
    cell.source.version = 2
    again(cell.manager).update_weights(2)
    cell.assert_serves(2)


def test_a_replica_that_joins_during_an_update_serves_its_version(cell, tmp_path):
    cell.manager.update_weights(1)
    cell.source.version = 2
    go = tmp_path / "go"
    cell.replicas["b"].set_fault(Fault(at="first", action="wait", until=str(go)))
    joining = cell.start("c")
    joined: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: cell.manager.update_weights(2)),
        threading.Thread(target=lambda: joined.append(cell.manager.add_replicas({"c": joining}))),
    ]
    threads[0].start()
    while cell.replicas["b"].health()["loading_version"] != 2:
        time.sleep(0.01)
    threads[1].start()
    time.sleep(0.3)
    assert not joined and joining.health()["weight_version"] == 0
    go.touch()
    for thread in threads:
        thread.join(30)
    cell.replicas["c"] = joining
    assert joined == [2] and set(cell.manager.replicas) == {"a", "b", "c"}
    cell.assert_serves(2)


def test_two_updates_of_one_version_at_once_are_one(cell):
    errors: list[RLCoreError] = []

    def update(phase: str) -> None:
        key = CallKey(run_id="run", attempt=1, global_step=1, phase=phase)
        try:
            cell.manager.with_key(key).update_weights(1)
        except RLCoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=update, args=(f"update-{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    cell.assert_serves(1)


def test_members_come_and_go(cell):
    cell.manager.update_weights(1)
    cell.manager.remove_replicas(["b", "unknown"])
    cell.source.version = 2
    assert cell.manager.update_weights(2)["replicas"] == 1
    cell.assert_serves(1, "b")
    assert cell.manager.add_replicas({"b": cell.replicas["b"]}) == 2
    cell.assert_serves(2)


def test_who_cannot_be_brought_up_does_not_join(cell):
    cell.manager.update_weights(1)
    joining = cell.start("c")
    joining.set_fault(Fault(at="last", action="refuse"))
    with pytest.raises(WeightTransferError, match="refused"):
        cell.manager.add_replicas({"c": joining})
    assert set(cell.manager.replicas) == {"a", "b"}
    assert joining.health()["weight_version"] == 0
    cell.assert_serves(1)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_update_under_64_requests_loses_none(cell, mode):
    replicas = {name: cell.start(name, step_s=0.01, deadline_s=150.0) for name in ("x", "y")}
    manager = cell.new_manager(replicas)
    client = LLMServerClient(Router(replicas, load_cap=0), seed=0)
    params = {"max_tokens": 40, "ignore_eos": True}

    def update() -> None:
        if mode == "abort":
            manager.abort_replicas()
        manager.update_weights(1)
        if mode == "abort":
            manager.resume_generation_replicas()

    async def main():
        running = [
            asyncio.create_task(client.generate(f"r{i}", [5, 6], {**params, "seed": 1000 * i}))
            for i in range(64)
        ]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(update)
        return await asyncio.gather(*running)

    outputs = asyncio.run(main())
    for i, output in enumerate(outputs):
        assert output.token_ids == [1000 * i + position for position in range(40)]
        assert output.weight_versions == sorted(output.weight_versions)
    assert {version for o in outputs for version in o.weight_versions} == {0, 1}
