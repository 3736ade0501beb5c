"""A run's cluster in memory, for tests of what supervises it: workers that die on a schedule."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.agent_loop.worker import WorkerStatus
from rlcore.errors import ActorUnavailableError


class FakeWorker:
    """An AgentLoopWorkerHandle without a process.

    Args:
        worker_id: Its id.
        calls: Gets the name of every call.
        lives: How many answers of `status` it lives to give; None: for ever.
        dies_of: What the answer after these raises.
        fails_to_start: What `ready` raises.
        drain_s: How long its prompts take to end.
        replicas: Names of those that it sends requests to.
    """

    def __init__(
        self,
        worker_id: str,
        calls: "CallLog",
        *,
        lives: int | None = None,
        dies_of: Exception | None = None,
        fails_to_start: Exception | None = None,
        drain_s: float = 0.0,
        replicas: Sequence[str] = (),
    ) -> None:
        self.worker_id = worker_id
        self._replicas = list(replicas)
        self._calls = calls
        self._lives = lives
        self._dies_of = dies_of or ActorUnavailableError(f"{worker_id} was killed by the test")
        self._fails_to_start = fails_to_start
        self._drain_s = drain_s
        self._num_answers = 0

    async def ready(self, deadline_s: float) -> None:
        """Start."""
        del deadline_s
        self._calls.add(f"ready {self.worker_id}")
        if self._fails_to_start is not None:
            raise self._fails_to_start

    async def status(self, deadline_s: float) -> WorkerStatus:
        """Return a status, or die.

        Raises:
            ActorUnavailableError: it is dead.
        """
        del deadline_s
        if self._num_answers == self._lives:
            raise self._dies_of
        self._num_answers += 1
        return WorkerStatus(
            worker_id=self.worker_id, active_prompts=0, active_sessions=0, claimed=0, finished=0,
            failed=0, failed_sessions=0, tokens=self._num_answers, tokens_per_s=0.0,
            in_flight=dict.fromkeys(self._replicas, 0),
        )  # fmt: skip

    async def set_replicas(self, replicas: Mapping[str, Any], deadline_s: float) -> None:
        """Hear who serves."""
        del deadline_s
        self._calls.add(f"{self.worker_id} hears of {', '.join(replicas.values())}")
        self._replicas = list(replicas)

    async def stop(self, deadline_s: float) -> dict[str, float]:
        """Drain.

        Raises:
            ActorUnavailableError: it took longer than `deadline_s`.
        """
        self._calls.add(f"stop {self.worker_id} within {deadline_s:g}")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(self._drain_s)
        except TimeoutError:
            raise ActorUnavailableError(f"{self.worker_id} did not answer") from None
        return {"tokens": float(self._num_answers)}

    def kill(self) -> None:
        """Die."""
        self._calls.add(f"kill {self.worker_id}")


class CallLog:
    """What was called, and when."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._times: list[float] = []

    def add(self, name: str) -> None:
        """Write a call down."""
        self.names.append(name)
        self._times.append(time.monotonic())

    def seconds_between(self, first: str, second: str) -> float:
        """Return how long after one call the other came."""
        return self._times[self.names.index(second)] - self._times[self.names.index(first)]


class FakeWorkerLedger:
    """A ledger that takes prompts back, after it has been started anew."""

    def __init__(self, calls: CallLog, failures: Sequence[Exception] = ()) -> None:
        self._calls = calls
        self._failures = list(failures)

    def release_worker(self, worker_id: str, is_blameless: bool = False) -> list[str]:
        """Take a worker's prompts back."""
        if self._failures:
            raise self._failures.pop(0)
        self._calls.add(f"release {worker_id}{' (blameless)' if is_blameless else ''}")
        return []


class FakeCluster:
    """The part of a cluster that a producer uses.

    Args:
        *workers: Parameters of one worker after the other; later ones live for ever.
        lost: What `serving` raises: a replica that could not be replaced.
        ledger_failures: What the ledger raises first.

    Attributes:
        replicas: Those that serve: name to whatever stands for the handle.
        calls: What was called on workers and ledger.
    """

    def __init__(
        self,
        *workers: dict[str, Any],
        lost: Exception | None = None,
        ledger_failures: Sequence[Exception] = (),
    ) -> None:
        self.calls = CallLog()
        self.ledger = FakeWorkerLedger(self.calls, ledger_failures)
        self.replicas: dict[str, str] = {}
        self._lost = lost
        self._scripts = list(workers)
        self._num_workers = 0

    def serving(self) -> dict[str, Any]:
        """Return the replicas that serve."""
        if self._lost is not None:
            raise self._lost
        return dict(self.replicas)

    def begin_end(self) -> None:
        """Hear that the run was cancelled."""
        self.calls.add("begin_end")

    def new_agent_loop_worker(self, index: int) -> FakeWorker:
        """Make the next worker; its id is `w<number>`."""
        del index
        self._num_workers += 1
        script = self._scripts.pop(0) if self._scripts else {}
        script = {"replicas": list(self.replicas), **script}
        return FakeWorker(f"w{self._num_workers}", self.calls, **script)
