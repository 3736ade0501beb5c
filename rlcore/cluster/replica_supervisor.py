"""Keeps the replicas of a run alive: out of the router, restarted, brought up, in again.

| waits | for | deadline |
|---|---|---|
| watch | answers of all replicas, side by side | `answer_s` |
| restart | the new replica's model | `start_s` |
| restart | a weight update that runs, then its own | the manager's |

A lost replica is killed first: an update that waits for it fails or goes on without it at once. The
new one is a member before it serves: an update that is tried again brings it up like the others.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rlcore.checkpoint_engine.base import Replica
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.errors import ReplicaDiedError, TransientError
from rlcore.rollout.health import HealthLimits, Losses, ReplicaHealth
from rlcore.types import CallKey

logger = logging.getLogger(__name__)

STOP_S = 3.0
"""How long `stop` waits for the threads; a replica that they start later is killed, too."""


class SupervisedReplica(Replica, Protocol):
    """A replica that can be asked how it is."""

    def health(self, deadline_s: float) -> dict[str, Any]:
        """Return state and counters."""
        ...

    def wait_ready(self, deadline_s: float) -> None:
        """Return when its model is loaded."""
        ...


class ReplicaSupervisor:
    """Watches the replicas that serve and replaces those that are lost.

    Example:
        >>> supervisor = ReplicaSupervisor(manager, replicas, start=start_one, key=key)
        >>> supervisor.start()
        >>> sorted(supervisor.serving)
        ['replica-0', 'replica-1']
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        replicas: Mapping[str, SupervisedReplica],
        *,
        start: Callable[[str], SupervisedReplica],
        key: Callable[[str], CallKey],
        limits: HealthLimits | None = None,
        on_change: Callable[[Mapping[str, SupervisedReplica]], None] | None = None,
    ) -> None:
        """Take the replicas over; nothing happens before `start` or `check`.

        Args:
            manager: Whose members they are.
            replicas: Those that serve now.
            start: Starts a replica of that name and returns at once.
            key: Names the caller of a phase.
            limits: When one is lost, and for how long it is tried again.
            on_change: Told who serves whenever that changes, from a thread of the supervisor.
        """
        self._manager = manager
        self._start = start
        self._key = key
        self._limits = limits or HealthLimits()
        self._on_change = on_change
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._serving = dict(replicas)
        self._health = {name: ReplicaHealth(name, self._limits) for name in replicas}
        self._losses = Losses(self._limits)
        self._since = dict.fromkeys(replicas, time.monotonic())
        self._starting: dict[str, SupervisedReplica] = {}
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def serving(self) -> dict[str, SupervisedReplica]:
        """The replicas that may get requests."""
        with self._lock:
            return dict(self._serving)

    def start(self) -> None:
        """Watch from now on."""
        self._in_thread(self._watch, "watch over replicas")

    def stop(self) -> None:
        """End the watch, and every replica."""
        self._stopping.set()
        with self._lock:
            left = [*self._serving.values(), *self._starting.values()]
            self._serving.clear()
            self._starting.clear()
        for replica in left:
            replica.kill()
        ends = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def raise_if_failed(self) -> None:
        """Let the caller know that a replica could not be replaced.

        Raises:
            ReplicaDiedError: it was tried `max_restarts` times, or is lost again and again.
            ConfigError: the configuration does not let it.
            Exception: whatever else ended a watch or a restart.
        """
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Ask every replica how it is, once; begin to replace those that are lost."""
        serving = self.serving
        if not serving:
            return
        with ThreadPoolExecutor(max_workers=len(serving)) as threads:
            reasons = list(threads.map(self._ask, serving, serving.values()))
        for (name, replica), reason in zip(serving.items(), reasons, strict=True):
            if reason:
                self._take_out(name, replica, reason)

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(self._limits.check_every_s):
                self.check()
        except Exception as error:  # noqa: BLE001  it is raised by raise_if_failed
            self._fail("the watch over replicas", error)

    def _ask(self, name: str, replica: SupervisedReplica) -> str:
        try:
            return self._health[name].answered(replica.health(self._limits.answer_s))
        except TransientError as error:
            return self._health[name].missed(error)

    def _take_out(self, name: str, replica: SupervisedReplica, reason: str) -> None:
        with self._lock:
            self._serving.pop(name, None)
            served_s = time.monotonic() - self._since[name]
        replica.kill()
        hopeless = self._losses.add(name, reason, self._health[name].requests, served_s)
        if hopeless:
            self._failure = ReplicaDiedError(hopeless)
            logger.error("%s is not replaced: %s", name, hopeless)
        else:
            logger.warning("%s; it is taken out and replaced", reason)
        self._tell()
        if not hopeless:
            self._in_thread(lambda: self._replace(name), f"restart of {name}")

    def _fail(self, what: str, error: Exception) -> None:
        """Let the run end with an error that nothing here can mend, rather than nobody watch."""
        if self._stopping.is_set():
            return  # whatever it worked with has ended
        self._failure = error
        logger.error("%s ended: %r", what, error, exc_info=error)

    def _replace(self, name: str) -> None:
        try:
            self._try_to_replace(name)
        except Exception as error:  # noqa: BLE001  it is raised by raise_if_failed
            self._fail(f"the restart of {name}", error)

    def _try_to_replace(self, name: str) -> None:
        delay_s, last = self._limits.backoff_s, "none"
        for number in range(1, self._limits.max_restarts + 1):
            try:
                self._bring_in(name, number)
            except TransientError as error:
                logger.warning("start %d of %s failed: %s", number, name, error)
                last = str(error)
            else:
                return
            if self._stopping.wait(delay_s):
                return
            delay_s *= 2
        self._failure = ReplicaDiedError(
            f"{name} could not be replaced in {self._limits.max_restarts} tries; last: {last}"
        )

    def _bring_in(self, name: str, number: int) -> None:
        new = self._start(name)
        with self._lock:
            self._starting[name] = new
        is_in = False
        try:
            if self._stopping.is_set():
                return
            new.wait_ready(self._limits.start_s)
            self._manager.replicas[name] = new
            key = self._key(f"bring_up-{name}-{number}")
            version = self._manager.with_key(key).add_replicas({name: new})
            with self._lock:
                is_in = name in self._starting  # else everything was stopped meanwhile
                self._starting.pop(name, None)
                if is_in:
                    self._health[name] = ReplicaHealth(name, self._limits)
                    self._since[name] = time.monotonic()
                    self._serving[name] = new
        finally:
            if not is_in:
                with self._lock:
                    self._starting.pop(name, None)
                new.kill()
        if is_in:
            logger.info("%s serves again, with weight version %s", name, version)
            self._tell()

    def _tell(self) -> None:
        # One after the other: who is told last must have heard of the last change.
        with self._telling:
            if self._on_change is not None and not self._stopping.is_set():
                self._on_change(self.serving)

    def _in_thread(self, work: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        self._threads[-1].start()
