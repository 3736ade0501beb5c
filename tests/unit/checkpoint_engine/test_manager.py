"""The weight update as a transaction: order, acknowledgements, gates, retries."""

import pickle
from pathlib import Path

import pytest
import torch

from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.errors import ConfigError, TransientError, WeightSyncError
from rlcore.testing.replicas import FakeReplica
from rlcore.types import CallKey, WeightMeta

KEY = CallKey(run_id="run", attempt=1, global_step=3, phase="update_weights")


class Source:
    """A trainer whose only weight is its version."""

    def __init__(self, folder: Path) -> None:
        self.published = None
        self.path = folder / "weights"
        self.version = 0

    def publish_weights(self, key: CallKey) -> WeightMeta:
        weight = torch.full((4,), float(self.version))
        self.published = write_tensors(self.path, [("w", weight)], "bfloat16", self.version)
        return self.published

    def published_weights(self) -> WeightMeta | None:
        return self.published


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


@pytest.fixture
def replicas() -> dict[str, FakeReplica]:
    return {"replica-0": FakeReplica(), "replica-1": FakeReplica()}


def test_every_replica_gets_the_weights_in_order(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    for version in (0, 1):
        source.version = version
        result = manager.update_weights(3)
        assert (result["version"], result["replicas"], result["bytes"]) == (version, 2, 8)
        assert result["seconds"] > 0 and result["gb_per_s"] > 0
        for replica in replicas.values():
            assert replica.weights["w"].tolist() == [version] * 4
            assert replica.weights["w"].dtype == torch.bfloat16
            assert (replica.version, replica.is_gated) == (version, False)
    assert replicas["replica-0"].calls == 2 * ["prepare_weights", "load_weights", "commit_weights"]


@pytest.mark.parametrize("stage", ["prepare_weights", "load_weights"])
def test_a_failure_opens_the_gates_on_the_old_weights(source, replicas, stage):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    manager.update_weights(0)
    source.version = 1
    replicas["replica-1"].fail_on = stage
    with pytest.raises(TransientError, match=stage):
        manager.update_weights(1)
    for replica in replicas.values():
        assert (replica.version, replica.is_gated) == (0, False)
        assert replica.calls[-1] == "abandon_weights"
    assert manager.update_weights(1)["version"] == 1
    assert {replica.version for replica in replicas.values()} == {1}


@pytest.mark.parametrize("lie", [{"version": 7}, {"num_bytes": 1}, {"checksum": "crc32:0"}])
def test_another_acknowledgement_is_no_commit(source, replicas, lie):
    replicas["replica-1"].lie = lie
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    with pytest.raises(WeightSyncError, match="replica-1 loaded"):
        manager.update_weights(0)
    for replica in replicas.values():
        assert replica.version is None
        assert "commit_weights" not in replica.calls and not replica.is_gated


def test_after_the_commit_began_nobody_serves_old_weights(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    replicas["replica-0"].fail_on = "commit_weights"
    with pytest.raises(TransientError, match="commit_weights"):
        manager.update_weights(0)
    assert replicas["replica-0"].is_gated
    assert not replicas["replica-1"].is_gated and replicas["replica-1"].version == 0
    manager.update_weights(0)
    assert not replicas["replica-0"].is_gated and replicas["replica-0"].version == 0


def test_a_gate_that_cannot_be_opened_does_not_hide_the_error(source, replicas, caplog):
    class Stuck(FakeReplica):
        def abandon_weights(self, key: CallKey, version: int) -> None:
            raise TransientError("no answer")

    stuck = Stuck()
    stuck.fail_on = "load_weights"
    manager = CheckpointEngineManager(source, {"stuck": stuck, **replicas}).with_key(KEY)
    with pytest.raises(TransientError, match="load_weights failed"):
        manager.update_weights(0)
    assert "replica stuck did not abandon version 0: no answer" in caplog.text
    assert not replicas["replica-0"].is_gated


def test_control_calls_reach_every_replica(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    manager.sleep_replicas()
    manager.wake_up_replicas()
    manager.abort_replicas()
    manager.resume_generation_replicas()
    for replica in replicas.values():
        assert replica.calls == ["sleep", "wake_up", "abort", "resume"]


def test_a_dead_replica_fails_no_control_call_and_a_refusal_does(source, replicas, caplog):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    replicas["replica-0"].kill()
    manager.sleep_replicas()
    assert "sleep goes on without replica-0" in caplog.text
    assert replicas["replica-1"].calls == ["sleep"]
    replicas["replica-1"].fail_on = "wake_up"
    with pytest.raises(TransientError, match="wake_up failed"):
        manager.wake_up_replicas()


def test_the_update_goes_on_without_a_dead_replica_and_fails_without_any(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    replicas["replica-0"].kill()
    result = manager.update_weights(0)
    assert (result["replicas"], result["lost"]) == (1, ["replica-0"])
    assert set(manager.replicas) == {"replica-1"}
    replicas["replica-1"].kill()
    source.version = 1
    with pytest.raises(TransientError, match="0 replicas are left, 1 are needed"):
        manager.update_weights(1)


def test_who_joins_gets_what_the_others_serve_not_what_the_trainer_has(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    manager.update_weights(0)
    source.version = 7  # trained on, and not published
    joining = FakeReplica()
    assert manager.add_replicas({"replica-2": joining}) == 0
    assert joining.weights["w"].tolist() == [0.0] * 4
    manager.remove_replicas(["replica-0", "nobody"])
    assert set(manager.replicas) == {"replica-1", "replica-2"}


def test_who_joins_rests_as_the_members_do(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    brought_up = ["prepare_weights", "load_weights", "commit_weights"]
    manager.update_weights(0)
    manager.sleep_replicas()
    manager.abort_replicas()
    # From a copy, as in an executor.
    manager = pickle.loads(pickle.dumps(manager))
    joined: list[list[str]] = []
    for end in ("wake_up_replicas", "resume_generation_replicas", "update_weights"):
        joining = FakeReplica()
        manager.add_replicas({f"after {len(joined)}": joining})
        joined.append(joining.calls[:])
        getattr(manager, end)(*([1] if end == "update_weights" else []))
    assert joined == [[*brought_up, "abort", "sleep"], [*brought_up, "abort"], brought_up]


def test_who_cannot_be_put_to_rest_does_not_join(source, replicas):
    manager = CheckpointEngineManager(source, replicas).with_key(KEY)
    manager.sleep_replicas()
    joining = FakeReplica()
    joining.fail_on = "sleep"
    with pytest.raises(TransientError, match="sleep failed"):
        manager.add_replicas({"replica-2": joining})
    assert set(manager.replicas) == {"replica-0", "replica-1"}


def test_misuse_is_refused(source, replicas):
    with pytest.raises(
        ConfigError, match=r"unknown checkpoint engine 'pigeon'; known: .*, mooncake, naive, nccl"
    ):
        CheckpointEngineManager(source, replicas, backend="pigeon")
    with pytest.raises(WeightSyncError, match="has no key"):
        CheckpointEngineManager(source, replicas).update_weights(0)
    with pytest.raises(WeightSyncError, match="no replica"):
        CheckpointEngineManager(source, {}).with_key(KEY).update_weights(0)


def test_it_can_be_sent_to_another_process():
    manager = CheckpointEngineManager(None, {}).with_key(KEY)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(manager)).key == KEY
