"""The pool of executors of a run: long-lived Ray actors in which phases' bodies run.

A body that is overdue or cancelled is fenced, its executor killed and its death awaited before the
caller hears of it, so that a retry never runs beside the old body. The processes themselves:
`executor_slots.py`; what runs in them: `executor_process.py`.

    run()    waits for: an idle executor, then the body (deadline_s); on any end of the wait but the
                        body's own, for the death of its process
"""

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from rlcore.cluster.executor_process import (
    ExecutorInfo,
    Outcome,
    current_key,
    dump_call,
    is_executor_process,
    require_executor,
)
from rlcore.cluster.executor_slots import ExecutorSlots, PoolLimits, Slot, is_local
from rlcore.cluster.log_stream import CallLog, LogAddress, RecordSink, StreamRecord
from rlcore.errors import ExecutorDiedError, FencedError, PhaseTimeoutError
from rlcore.types import CallKey

__all__ = [
    "ExecutorPool",
    "PoolLimits",
    "current_key",
    "is_executor_process",
    "require_executor",
]

STDERR_LINES = 20


class ExecutorPool:
    """Runs bodies in `size` executors, one at a time in each.

    Args:
        size: executors; as many bodies run at once.
        user_modules: Python files that every executor loads when it starts.
        on_stray: gets log records that belong to no running body, in a thread of the log server.
        on_fence: called in a thread with the key of a try that is given up, before its executor is
            killed, so that collaborators can refuse that try from then on.
        limits: sizes and deadlines.
    """

    def __init__(
        self,
        size: int,
        *,
        user_modules: Sequence[str] = (),
        on_stray: RecordSink | None = None,
        on_fence: Callable[[CallKey], None] | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"an executor pool needs at least one executor, not {size}")
        self.pool_id = uuid.uuid4().hex
        self.limits = limits or PoolLimits()
        self._slots = ExecutorSlots(
            size, user_modules=user_modules, on_fence=on_fence, limits=self.limits
        )
        if on_stray is not None:
            self._slots.set_stray_sink(on_stray)
        self._attempts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._call_ids = itertools.count(1)

    @property
    def log_address(self) -> LogAddress:
        """Where actors of this run send their log records (`connect_log_stream`)."""
        return self._slots.log_server.address

    def set_stray_sink(self, sink: RecordSink) -> None:
        """Send the records of workers, replicas and idle executors to `sink`."""
        self._slots.set_stray_sink(sink)

    def start(self) -> None:
        """Start all executors in parallel and wait until they are ready; call it in a thread.

        Raises:
            RuntimeError: Ray is not up.
            DeadlineExceededError: an executor is not ready in time.
            Exception: what a user's module raised when it was loaded.
        """
        self._slots.start()

    def close(self) -> None:
        """Kill all executors and wait until they are dead; calls that still run fail.

        Call it in a thread: it takes up to `death_deadline_s`.
        """
        self._slots.close()

    def status(self) -> list[str]:
        """Return one line per executor: who it is and what it does."""
        return self._slots.status()

    def executors(self) -> list[ExecutorInfo]:
        """Return the executors that are up."""
        return self._slots.executors()

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: CallKey,
        deadline_s: float | None = None,
        on_log: RecordSink | None = None,
    ) -> Any:
        """Run `fn(*args, **kwargs)` in an executor and return its result.

        Args:
            fn: the body, sync or async; pickled by value unless a module of that name has it.
            args: its positional parameters.
            kwargs: its named parameters.
            key: who calls; `current_key()` in the body.
            deadline_s: for the body once it runs; None for no limit.
            on_log: gets the body's log records, in a thread; the last may come a moment after the
                result, but never after the death of the process.

        Raises:
            PayloadTooLargeError: parameters or result are over the limit.
            PhaseTimeoutError: the body was overdue; its process is dead.
            ExecutorDiedError: its process died.
            FencedError: a later attempt of this run has called already.
            DeadlineExceededError: no executor became idle.
            BaseException: what the body raised, with its traceback there as cause.
        """
        self._check_attempt(key)
        payload = dump_call(fn, args, kwargs or {}, limit=self.limits.payload_bytes)
        slot = await self._slots.acquire(key)
        call_id = str(next(self._call_ids))
        log = self._slots.log_server.open_call(call_id, on_log)
        try:
            ref = slot.actor.run.remote(payload, call_id, key, self.limits.payload_bytes)
            outcome = await self._reply(ref, slot, key, deadline_s, log)
        except BaseException:
            self._slots.log_server.close_call(
                call_id
            )  # its process is dead: there are no more records
            raise
        if not outcome.has_records:
            self._slots.log_server.close_call(call_id)
        return outcome.unwrap()

    def _check_attempt(self, key: CallKey) -> None:
        with self._lock:
            highest = self._attempts.setdefault(key.run_id, key.attempt)
            self._attempts[key.run_id] = max(highest, key.attempt)
        if key.attempt < highest:
            raise FencedError(f"{key} is refused: attempt {highest} of this run has called already")

    async def _reply(
        self, ref: Any, slot: Slot, key: CallKey, deadline_s: float | None, log: CallLog
    ) -> Outcome:
        """Wait for the body; on any end but its own, return only when its process is dead."""
        reply = asyncio.wrap_future(ref.future())
        reply.add_done_callback(_retrieve)
        try:
            done, _ = await asyncio.wait({reply}, timeout=deadline_s)
        except asyncio.CancelledError:
            await self._slots.put_down(slot, key)
            raise
        if not done:
            who = str(slot)
            await self._slots.put_down(slot, key)
            raise PhaseTimeoutError(
                f"phase {key.phase} is overdue: {who}, its deadline is {deadline_s:g} s; that "
                "process was killed and is dead"
            )
        try:
            outcome: Outcome = reply.result()
        except RayError as exc:
            info = slot.info
            await self._slots.put_down(slot, key)
            _write_stderr(info, log)
            raise ExecutorDiedError(
                f"{info} died while it ran {key}: {' '.join(str(exc).split())[:600]}"
            ) from exc
        self._slots.release(slot)
        return outcome


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the error of a reply that nobody waits for any more as seen."""
    if not future.cancelled():
        future.exception()


def _write_stderr(info: ExecutorInfo | None, log: CallLog) -> None:
    """Add the last lines of a dead executor's standard error, where this host has the file."""
    if info is None or not info.stderr_path or not is_local(info):
        return
    path = Path(info.stderr_path)
    text = path.read_text(errors="replace") if path.is_file() else ""
    # Ray writes marks of its own, e.g. ":actor_name:Executor".
    lines = [line for line in text.splitlines() if not line.startswith(":")][-STDERR_LINES:]
    if lines:
        log.write(
            StreamRecord(
                source=info.source,
                call_id="",
                name=f"{info.source}.stderr",
                level=logging.ERROR,
                created=time.time(),
                message="\n".join(lines),
            )
        )
