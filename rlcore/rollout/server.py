"""One replica: an engine in a thread of its own, its state, its gate and its control lane.

| waits | for | woken by | deadline |
|---|---|---|---|
| request (parked) | the gate to open | the engine thread, when it admits | `request_s` |
| request (running) | its last token | the engine thread | `request_s` |
| control call | its turn, between two steps | the engine thread | `control_s`, `load_s` |
| engine thread | a request, a command, an open gate | whoever brings one | looks once a second |

States: loading -> ready; draining (finishes what runs) -> paused; asleep (no key/value memory);
dead (the engine raised). The gate is closed while paused, draining, or during a weight update.
Requests that arrive then are parked; those that run are frozen during a weight update and go on
with the new weights, their keys and values of older weights kept.

One file, though a long one: it is one state machine under one lock, and its two sides (callers, the
engine thread) can be judged only side by side.
"""

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.config import RunConfig
from rlcore.errors import (
    ActorUnavailableError,
    ConfigError,
    DeadlineExceededError,
    ReplicaBusyError,
    RLCoreError,
    RolloutError,
    TransientError,
)
from rlcore.fencing import Fence
from rlcore.rollout.engine import Engine, EngineRequest
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.rollout.weight_update import WeightUpdate
from rlcore.types import CallKey, TokenOutput, WeightMeta

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "paused", "asleep", "dead"]


class _Waiter:
    """A future of an event loop that another thread may settle, also when nobody waits any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def set_result(self, value: Any) -> None:
        self._settle(lambda: self.future.set_result(value))

    def set_exception(self, error: BaseException) -> None:
        def fail() -> None:
            self.future.set_exception(error)
            # Marks it as seen: of two futures of a request, one may have nobody waiting.
            self.future.exception()

        self._settle(fail)

    def _settle(self, action: Callable[[], None]) -> None:
        # The caller's loop may have ended meanwhile; then nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else action())


@dataclass(kw_only=True, slots=True)
class _Pending:
    request: EngineRequest
    done: _Waiter
    admitted: _Waiter


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerDeadlines:
    """When a wait in a replica is overdue, in seconds."""

    request_s: float = 600.0
    """A request: to be admitted, and again to finish; also for what runs to drain."""
    control_s: float = 120.0
    """A control call: its turn between two steps of the engine, and its work."""
    load_s: float = 300.0
    """To load published weights."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "ServerDeadlines":
        """Read `deadlines.{session,control,start}`."""
        deadlines = config.deadlines
        return cls(request_s=deadlines.session, control_s=deadlines.control, load_s=deadlines.start)


class LLMServer:
    """Generates for many callers and obeys control calls at once.

    All coroutines may be called from any event loop. Control calls carry a CallKey; older ones are
    refused. A repeated control call finds its work done and does nothing.

    Example:
        >>> server = LLMServer(lambda: ENGINES.get(spec.name)(spec), run_id="r", attempt=1)
        >>> output = await server.generate("s-0", [1, 2, 3], {"max_tokens": 8, "seed": 1})
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        run_id: str,
        attempt: int = 1,
        name: str = "replica 0",
        deadlines: ServerDeadlines | None = None,
    ) -> None:
        """Start the engine thread, which builds the engine; the state is `loading` until then."""
        self.name = name
        self._make_engine = make_engine
        self._fence = Fence(run_id, attempt)
        self._deadlines = deadlines or ServerDeadlines()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._is_paused = self._is_asleep = self._is_held = self._stopping = False
        self._drains: list[_Waiter] = []
        self._update = WeightUpdate(name)
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[Engine], Any], _Waiter, str]] = deque()
        self._parked: deque[_Pending] = deque()
        self._running: dict[str, _Pending] = {}
        self._last_step = self._last_rest = time.monotonic()
        self._broken_by: list[str] = []
        self._thread = threading.Thread(target=self._run, name=f"{name} engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """What the replica does now."""
        if self._error is not None or self._stopping:
            return "dead"
        if self._engine is None:
            return "loading"
        if self._is_asleep:
            return "asleep"
        if self._drains:
            return "draining"
        return "paused" if self._is_paused else "ready"

    # Generation

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample a response; parked while the gate is closed.

        Raises:
            ConfigError: the parameters or the length are impossible.
            RolloutError: a request of this id is here already.
            DeadlineExceededError: parked or running for too long.
            ActorUnavailableError: the replica is dead.
        """
        params = SamplingParams.from_dict(sampling_params)
        request = EngineRequest(request_id=request_id, prompt_ids=list(prompt_ids), params=params)
        pending = _Pending(request=request, done=_Waiter(), admitted=_Waiter())
        with self._wake:
            self._raise_if_dead()
            if request_id in self._running or any(
                p.request.request_id == request_id for p in self._parked
            ):
                raise RolloutError(f"{self.name}: request {request_id} is here already")
            self._parked.append(pending)
            self._wake.notify()
        try:
            await self._within(
                pending.admitted, self._deadlines.request_s, f"request {request_id} to be admitted"
            )
            return await self._within(
                pending.done, self._deadlines.request_s, f"request {request_id} to finish"
            )
        finally:
            if not pending.done.future.done() or pending.done.future.cancelled():
                self._drop(pending)

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a request has sampled so far; None for one that is not running here."""
        if request_id not in self._running:
            return None
        return await self._command(lambda engine: engine.partial(request_id), "partial")

    # Control lane

    async def give_up(self, key: CallKey) -> None:
        """Refuse a try of a phase from now on; its process is about to be killed."""
        self._fence.give_up(key)

    async def abort(self, key: CallKey) -> int:
        """Close the gate and end what runs: every request returns its tokens as `aborted`.

        Returns:
            How many requests were ended. New ones are parked until `resume`.
        """
        return await self._control(key, self._do_abort, "abort")

    async def pause(self, key: CallKey, keep: bool) -> None:
        """Close the gate.

        Args:
            key: who calls.
            keep: freeze what runs, it goes on after `resume`; otherwise let it finish first.
        """
        drained = await self._control(key, lambda _: self._do_pause(), "pause", drain=not keep)
        if drained is not None:
            await self._within(
                drained, self._deadlines.request_s, f"{len(self._running)} requests to drain"
            )

    async def resume(self, key: CallKey) -> None:
        """Open the gate."""
        await self._control(key, lambda _: self._do_resume(), "resume")

    async def sleep(self, key: CallKey) -> None:
        """Free the memory of keys and values. A request or `wake_up` gets it again.

        Raises:
            ReplicaBusyError: requests are in flight: abort or drain them first. One that was
                cancelled goes away by itself, so the call may be tried again.
        """
        await self._control(key, self._do_sleep, "sleep")

    async def wake_up(self, key: CallKey) -> None:
        """Get the memory again, with the last committed weights."""
        await self._control(key, self._do_wake_up, "wake_up")

    async def prepare_weights(self, key: CallKey, version: int) -> None:
        """Close the gate for the update to `version`; what runs is frozen.

        Raises:
            WeightSyncError: another update of the same caller is open.
        """
        await self._control(key, lambda _: self._update.prepare(key, version), "prepare_weights")

    async def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """Load published weights beside those in use; the gate stays closed.

        Returns:
            version, num_bytes and checksum of what was loaded.

        Raises:
            WeightSyncError: not prepared, or of a version seen with other bytes.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._fence.admit(key)
        deadline_s = self._deadlines.load_s
        return await self._command(
            lambda e: self._update.load(e, meta), "load_weights", deadline_s=deadline_s
        )

    async def commit_weights(self, key: CallKey, version: int) -> None:
        """Serve `version` from now on and open the gate; running requests go on with it.

        Raises:
            WeightSyncError: `version` is not loaded.
        """
        await self._control(key, lambda e: self._update.commit(e, version), "commit_weights")

    async def abandon_weights(self, key: CallKey, version: int) -> None:
        """Give the update to `version` up and open the gate with the weights as they were."""
        await self._control(key, lambda _: self._update.abandon(version), "abandon_weights")

    async def committed_weights(self) -> WeightMeta | None:
        """Return what was committed last; None: the weights of the model folder are served."""
        return self._update.committed

    async def health(self) -> dict[str, Any]:
        """Return state and counters; answers whatever the engine thread does."""
        engine = self._engine
        return {
            "name": self.name,
            "pid": os.getpid(),
            "state": self.state,
            "error": "" if self._error is None else repr(self._error),
            "weight_version": None if engine is None else engine.weight_version,
            "loading_version": self._update.version,
            "in_flight": len(self._running),
            "requests": self._broken_by or self._computing(engine),
            "parked": len(self._parked),
            "slots": None if engine is None else engine.max_num_seqs,
            "num_tokens": 0 if engine is None else engine.num_tokens,
            # Since the last step that it made or could not make: an engine that was asleep,
            # paused or without a request for an hour has not been silent.
            "last_step_age_s": time.monotonic() - max(self._last_step, self._last_rest),
        }

    def _computing(self, engine: Engine | None) -> list[str]:
        """Return the requests that have the engine's slots: the oldest ones."""
        with self._wake:
            return list(self._running)[: 0 if engine is None else engine.max_num_seqs]

    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is built.

        Raises:
            ConfigError: the configuration does not let it.
            ActorUnavailableError: it could not be.
            DeadlineExceededError: it was not in time.
        """
        await self._command(lambda _: None, "loading", deadline_s=deadline_s)

    async def close(self) -> None:
        """End the engine thread; whatever waits gets ActorUnavailableError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self._deadlines.control_s)

    # Caller's side

    def _raise_if_dead(self) -> None:
        if self._error is not None or self._stopping:
            raise self._death()

    def _death(self) -> Exception:
        """What callers get from now on: a user's mistake as it is, else something to retry."""
        if self._error is None:
            return ActorUnavailableError(f"{self.name} was closed")
        if isinstance(self._error, ConfigError):
            return self._error
        return ActorUnavailableError(f"{self.name} is dead: {self._error!r}")

    async def _control(
        self, key: CallKey, action: Callable[[Engine], Any], what: str, *, drain: bool = False
    ) -> Any:
        self._fence.admit(key)
        if not drain:
            return await self._command(action, what)
        drained = _Waiter()
        await self._command(lambda _: self._drains.append(drained), what)
        return drained

    async def _command(
        self, action: Callable[[Engine], Any], what: str, *, deadline_s: float | None = None
    ) -> Any:
        waiter = _Waiter()
        with self._wake:
            self._raise_if_dead()
            self._commands.append((action, waiter, what))
            self._wake.notify()
        return await self._within(waiter, deadline_s or self._deadlines.control_s, what)

    async def _within(self, waiter: _Waiter, deadline_s: float, what: str) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await waiter.future
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.name}: waited {deadline_s:g} s for {what}; the replica is {self.state}"
                f"{self._update.describe()}, {len(self._running)} requests run, "
                f"{len(self._parked)} are parked, the last step was "
                f"{time.monotonic() - self._last_step:.0f} s ago"
            ) from None

    def _drop(self, pending: _Pending) -> None:
        """Forget a request whose caller is gone."""
        request_id = pending.request.request_id
        with self._wake:
            if pending in self._parked:
                self._parked.remove(pending)
            elif self._running.get(request_id) is pending and self._error is None:
                action = functools.partial(self._end, request_id=request_id)
                self._commands.append((action, pending.done, f"the end of request {request_id}"))
                self._wake.notify()

    # Engine thread

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
            while not self._stopping:
                self._turn(self._engine)
        except Exception as error:
            logger.exception("%s: the engine failed", self.name)
            self._broken_by = self._computing(self._engine)
            self._error = error
        self._fail_all()
        if self._engine is not None:
            try:
                self._engine.close()
            except Exception:
                logger.exception("%s: the engine did not end", self.name)

    def _turn(self, engine: Engine) -> None:
        """Take up the commands, admit, do one step."""
        with self._wake:
            if not self._may_step(engine):
                if not self._commands:
                    self._wake.wait(timeout=1.0)
                self._last_rest = time.monotonic()  # up to here, and waking up may take a while
            commands = list(self._commands)
            self._commands.clear()
        for action, waiter, what in commands:
            self._take_up(engine, action, waiter, what)
        self._admit(engine)
        self._settle_drains()
        self._hold_or_go_on(engine)
        if not self._may_step(engine):
            return
        self._last_step = time.monotonic()
        for request_id, output in engine.step():
            self._finish(request_id, output)

    def _may_step(self, engine: Engine) -> bool:
        """Whether a turn would do something besides waiting."""
        if self._update.is_open or self._is_paused:
            return False
        return bool(self._running) or (bool(self._parked) and not self._drains)

    def _take_up(
        self, engine: Engine, action: Callable[[Engine], Any], waiter: _Waiter, what: str
    ) -> None:
        try:
            result = action(engine)
            # Before the caller hears of it: what it does next relies on the gate.
            self._hold_or_go_on(engine)
        except RLCoreError as error:
            waiter.set_exception(error)  # a refused call is its caller's affair
        except OSError as error:
            waiter.set_exception(TransientError(f"{self.name}: {what} failed: {error!r}"))
        except Exception as error:
            # Ends the engine. An error of ours: what else an engine raises nobody would retry.
            waiter.set_exception(
                ActorUnavailableError(f"{self.name} is dead: {what} failed: {error!r}")
            )
            raise
        else:
            waiter.set_result(result)

    def _hold_or_go_on(self, engine: Engine) -> None:
        """Tell an engine that samples by itself whether the gate is closed."""
        is_closed = self._update.is_open or self._is_paused
        if is_closed != self._is_held:
            (engine.hold if is_closed else engine.go_on)()
            self._is_held = is_closed

    def _admit(self, engine: Engine) -> None:
        if self._update.is_open or self._is_paused or self._drains:
            return
        while self._parked:
            with self._wake:
                if not self._parked:
                    return
                pending = self._parked.popleft()
                self._running[pending.request.request_id] = pending
            pending.admitted.set_result(None)
            if self._is_asleep:
                logger.info("%s: woken by request %s", self.name, pending.request.request_id)
                self._do_wake_up(engine)
            try:
                engine.check(pending.request)
            except ValueError as error:
                del self._running[pending.request.request_id]
                pending.done.set_exception(error)
            else:
                engine.add(pending.request)

    def _finish(self, request_id: str, output: TokenOutput) -> None:
        pending = self._running.pop(request_id, None)
        if pending is not None:
            pending.done.set_result(output)

    def _end(self, engine: Engine, request_id: str) -> None:
        output = engine.abort(request_id)
        if output is not None:
            self._finish(request_id, output)

    def _settle_drains(self) -> None:
        if self._drains and not self._running:
            drains, self._drains = self._drains, []
            self._is_paused = True
            for waiter in drains:
                waiter.set_result(None)

    def _do_abort(self, engine: Engine) -> int:
        ids = list(self._running)
        self._is_paused = True
        for request_id in ids:
            self._end(engine, request_id)
        return len(ids)

    def _do_pause(self) -> None:
        self._is_paused = True
        self._end_drains("paused")

    def _do_resume(self) -> None:
        self._is_paused = False
        self._end_drains("resumed")

    def _end_drains(self, by: str) -> None:
        drains, self._drains = self._drains, []
        for waiter in drains:
            waiter.set_exception(RolloutError(f"{self.name}: {by} while it drained"))

    def _do_sleep(self, engine: Engine) -> None:
        if self._running:
            raise ReplicaBusyError(
                f"{self.name}: sleep with {len(self._running)} requests in flight "
                f"({', '.join(list(self._running)[:5])}): abort or drain them first"
            )
        engine.release_cache()
        self._is_asleep = True

    def _do_wake_up(self, engine: Engine) -> None:
        engine.restore_cache()
        self._is_asleep = False

    def _fail_all(self) -> None:
        with self._wake:
            self._stopping = True
            waiters = [waiter for _, waiter, _ in self._commands] + self._drains
            for pending in (*self._parked, *self._running.values()):
                waiters += [pending.admitted, pending.done]
            self._commands.clear()
            self._parked.clear()
            self._running.clear()
        error = self._death()
        for waiter in waiters:
            waiter.set_exception(error)
