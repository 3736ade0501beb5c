"""A start that is cancelled: what it has made is ended in time, whatever still hangs."""

import asyncio
import threading
import time

import psutil
import pytest

from rlcore.cluster.calls import kill_actor
from rlcore.cluster.ends import Ends
from rlcore.cluster.ledger import start_ledger
from rlcore.cluster.start import END_S, Cluster
from rlcore.errors import ActorUnavailableError
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.run_folder import RunFolder

pytestmark = pytest.mark.integration

CANCEL_S = 25


@pytest.fixture
def make_cluster(ray_session, tmp_path):
    def make(kind=Cluster):
        config = tiny_config(tmp_path)
        folder = RunFolder.create(tmp_path / "runs" / "x", run_id="x", request={})
        return kind(config, folder=folder, attempt=1, total_steps=4)

    return make


def cancel_when(cluster, is_time):
    """Start a cluster and cancel that once `is_time()`; return how long it then took to end."""

    async def main():
        starting = asyncio.create_task(cluster.start())
        async with asyncio.timeout(120):
            while not is_time():
                assert not starting.done(), starting
                await asyncio.sleep(0.02)
        began = time.monotonic()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await cluster.shutdown()
        return time.monotonic() - began

    return asyncio.run(main())


def test_a_model_that_is_being_loaded_does_not_delay_the_end(make_cluster):
    """The trainer's process is killed while it loads; nobody waits for it."""

    class Watched(Cluster):
        def _at_end(self, what, action, *args):
            super()._at_end(what, action, *args)
            ends.add(what)

    ends = set()
    cluster = make_cluster(Watched)
    seconds = cancel_when(cluster, lambda: {"trainer", "replica-0"} <= ends)
    assert seconds < END_S
    pids = [info.pid for info in cluster.executors.executors()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_end_of_a_cancelled_start_is_bounded_whatever_hangs(make_cluster):
    never = threading.Event()
    ledgers = []

    class Hangs(Cluster):
        def _start_training(self):
            self._at_end("trainer", never.wait)
            never.wait()

        def _start_replicas(self):
            never.wait()

        def _start_buffer(self):
            journal = self.folder.path / "journal.jsonl"
            ledgers.append(start_ledger("x", str(journal), 1))
            self._at_end("ledger", kill_actor, ledgers[0].handle)

    cluster = make_cluster(Hangs)
    cluster._ends = Ends(budget_s=6.0, last_s=1.0)
    try:
        assert 4.5 < cancel_when(cluster, lambda: ledgers) < 8
        with pytest.raises(ActorUnavailableError):
            for _ in range(100):
                ledgers[0].ping()
                time.sleep(0.1)
        assert END_S < CANCEL_S
    finally:
        never.set()
