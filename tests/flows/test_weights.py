"""The manager that hooks call: what a call changes is changed in the driver, too; no Ray."""

import pickle

import pytest

from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.config import load_config
from rlcore.testing.replicas import FakeReplica
from rlcore.testing.weight_source import WeightSource
from rlcore.types import CallKey
from tasks.deadlines import PhaseDeadlines
from tasks.weights import TaskCheckpointManager, manager_call, manager_options


def key(phase: str) -> CallKey:
    return CallKey(run_id="run", attempt=1, global_step=1, phase=phase)


class OnACopy(TaskCheckpointManager):
    """Calls a copy of the plain manager here, as an executor does elsewhere."""

    meanwhile = staticmethod(lambda: None)
    """What happens in the driver during a call."""

    def _call(self, method, *args):
        result = getattr(pickle.loads(pickle.dumps(self._manager)).with_key(key(method)), method)(
            *args
        )
        self.meanwhile()
        return result


@pytest.fixture
def plain(tmp_path) -> CheckpointEngineManager:
    source = WeightSource(tmp_path)
    source.version = 1
    return CheckpointEngineManager(source, {name: FakeReplica() for name in "abc"})


@pytest.fixture
def manager(plain) -> OnACopy:
    return OnACopy(
        plain, key=key, deadlines=PhaseDeadlines(load_config("grpo-tiny", {})), start_s=300.0
    )


def test_a_replica_that_an_update_lost_is_no_member_of_the_drivers_manager(plain, manager):
    plain.replicas["b"].kill()
    assert manager.update_weights(1)["lost"] == ["b"]
    assert set(plain.replicas) == {"a", "c"}


def test_one_that_took_its_place_during_the_update_stays(plain, manager):
    plain.replicas["b"].kill()
    new = FakeReplica()
    manager.meanwhile = lambda: plain.replicas.update(b=new)
    assert manager.update_weights(1)["lost"] == ["b"]
    assert plain.replicas["b"] is new


def test_the_driver_knows_how_replicas_rest(plain, manager):
    seen = [set(plain.resting)]
    for method in (
        "abort_replicas", "sleep_replicas", "wake_up_replicas", "resume_generation_replicas"
    ):  # fmt: skip
        getattr(manager, method)()
        seen.append(set(plain.resting))
    assert seen == [set(), {"abort"}, {"abort", "sleep"}, {"abort"}, set()]


@pytest.mark.parametrize("start_s", [0.1, 60.0, 300.0, 7200.0])
def test_calls_are_tried_until_a_lost_replica_had_its_time_to_start(start_s):
    options = manager_options(start_s)
    delays = options["retry_delay_seconds"]
    assert delays[:3] == [1, 4, 16]
    assert options["retry_jitter_factor"] == 0
    assert options["retries"] == len(delays)
    # 12 s until the watch over replicas has noticed the loss; and not much longer.
    assert max(21, start_s + 12) <= sum(delays) < max(22, start_s + 12 + max(delays))
    assert manager_call.with_options(**options).retry_delay_seconds == delays
