"""The Ray task runner of rollflow: Prefect's engine on the flow's loop, bodies in executors.

Stock, `prefect_ray.RayTaskRunner` runs the whole task engine in a Ray task: 85-140 ms a task, and a
body whose worker is killed is run again by Ray without Prefect knowing. Here the engine (states,
retries, hooks) runs on the event loop of the flow, and only the task's body is awaited in a
long-lived executor: about 5 ms, and a killed executor is an ordinary failed try.

    submit        waits for: nothing; from the flow's loop or from any thread
    engine task   waits for: upstream futures, then an idle executor, then the body (deadline)
    PhaseFuture   awaited on a loop; `.result()` and `.wait()` in threads other than the loop's
"""

import asyncio
import concurrent.futures
import contextvars
import copy
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import uuid4

import ray
from prefect import Task
from prefect.client.schemas.objects import RunInput, State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.logging.loggers import task_run_logger
from prefect.states import Crashed
from prefect.task_engine import run_task_async
from prefect_ray import RayTaskRunner

from rlcore.cluster.executor import ExecutorPool, is_executor_process
from rlcore.cluster.executor_process import RemoteTracebackError
from rlcore.types import CallKey
from tasks.log_relay import LogRelay
from tasks.phase_future import PhaseFuture, running_loop, wait_for_upstreams

NO_RUNNER = "Unable to determine task runner"
"""How Prefect's message begins when a task is submitted outside a flow."""
NESTED_SUBMIT = (
    "a phase's body submitted a task, which is refused: bodies run in an executor, tasks are "
    "submitted by the flow or a hook"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """Whose phases a runner runs."""

    run_id: str = ""
    attempt: int = 1
    deadline_for: Callable[[str], float | None] | None = None
    """Task name -> seconds, for tasks without `timeout_seconds`."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Shared:
    """What all handles on one pool share."""

    relay: LogRelay = field(default_factory=LogRelay)
    engines: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = field(default_factory=dict)
    retries: Counter[str] = field(default_factory=Counter[str])
    lock: threading.Lock = field(default_factory=threading.Lock)


class PhaseRunner(RayTaskRunner[Any]):
    """A handle on the run's executor pool that Prefect takes for a task runner.

    The flow engine duplicates and enters a runner for every flow run; here all duplicates share
    the pool, and entering and leaving neither start, kill nor wait for an executor. Leaving cancels
    the phases of that flow run that have not ended.

    Args:
        pool: started by the driver, closed by the driver.
        options: whose phases these are.

    Example:
        >>> runner = PhaseRunner(pool, RunnerOptions(run_id="r1", attempt=1))
        >>> page = train_step.with_options(task_runner=runner)
    """

    def __init__(self, pool: ExecutorPool, options: RunnerOptions | None = None) -> None:
        super().__init__()
        self._pool: ExecutorPool | None = pool
        self._pool_id = pool.pool_id
        self._options = options or RunnerOptions()
        self._shared: _Shared | None = _Shared()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own: set[asyncio.Task[Any]] = set()
        pool.set_stray_sink(self._shared.relay.write_stray)

    def duplicate(self) -> "PhaseRunner":
        """Return another handle on the same pool."""
        other = object.__new__(type(self))  # copy.copy would drop what pickling drops
        vars(other).update(vars(self))
        other._started = False
        other._loop = None
        other._own = set()
        return other

    def __enter__(self) -> "PhaseRunner":
        self._required_pool()
        if not ray.is_initialized():
            raise RuntimeError("Ray is not up: the driver calls ray.init before it starts a flow")
        loop = running_loop()
        if loop is None:
            raise RuntimeError("a PhaseRunner runs phases on the flow's loop: make the flow async")
        super(RayTaskRunner, self).__enter__()  # RayTaskRunner's own would call ray.init
        self._loop = loop
        return self

    def __exit__(self, *exc_info: Any) -> None:
        left = [engine for engine in self._own if not engine.done()]
        if left:
            names = ", ".join(sorted(engine.get_name() for engine in left))
            self.logger.warning("The flow ended before its phases %s: they are cancelled", names)
        for engine in left:
            engine.cancel()
        super(RayTaskRunner, self).__exit__(None, None, None)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PhaseRunner)
            and self._pool_id == other._pool_id
            and self._options == other._options
        )

    def __hash__(self) -> int:
        return hash(self._pool_id)

    def __getstate__(self) -> dict[str, Any]:
        # Flows are pickled when Prefect ships them; executors stay with the driver.
        state = dict(self.__dict__)
        state.update(_pool=None, _shared=None, _loop=None, _own=set(), _started=False)
        state["_options"] = replace(self._options, deadline_for=None)
        return state

    def retry_counts(self) -> dict[str, int]:
        """Return how often each phase was tried again, over all flow runs of this pool."""
        shared = self._required_shared()
        with shared.lock:
            return dict(shared.retries)

    def cancel_all(self) -> None:
        """Cancel every phase of every handle on this pool; Prefect calls it on a signal."""
        shared = self._required_shared()
        with shared.lock:
            engines = list(shared.engines.items())
        for engine, loop in engines:
            if not loop.is_closed():
                loop.call_soon_threadsafe(engine.cancel)

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] - our future is no ObjectRef's
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PhaseFuture[Any]:
        """Start a task's engine on the flow's loop and return its future.

        Raises:
            RuntimeError: the runner is not entered, or this is a body in an executor.
            TypeError: the task is a generator.
        """
        self._required_pool()
        loop = self._loop
        if not self._started or loop is None:
            raise RuntimeError("The task runner must be started before submitting work.")
        if task.isgenerator:
            raise TypeError(f"task {task.name!r} is a generator; a phase returns one small result")
        task_run_id = uuid4()
        ended: concurrent.futures.Future[State[Any]] = concurrent.futures.Future()
        ended.set_running_or_notify_cancel()  # so that cancelling a waiter cannot cancel it

        wait_list = wait_for if isinstance(wait_for, PrefectFuture) else list(wait_for or ())

        async def drive() -> State[Any]:
            await wait_for_upstreams((parameters, wait_list))
            state = await run_task_async(
                task=self._with_remote_body(task),
                task_run_id=task_run_id,
                parameters=parameters,
                wait_for=wait_list or None,
                return_type="state",
                dependencies=dependencies,
            )
            return cast("State[Any]", state)

        start = functools.partial(self._start, loop, task.name, drive, ended)
        context = contextvars.copy_context()
        if running_loop() is loop:
            start(context)
        else:
            loop.call_soon_threadsafe(start, context)
        return PhaseFuture(task_run_id, ended, loop)

    def map(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
    ) -> Any:
        """Submit a task for each element; a future as an iterable has to have ended on the loop."""
        return super().map(task, parameters, wait_for)

    def _start(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        drive: Callable[[], Coroutine[Any, Any, State[Any]]],
        ended: "concurrent.futures.Future[State[Any]]",
        context: contextvars.Context,
    ) -> None:
        """Make the engine's task; runs on the loop."""
        shared = self._required_shared()
        if not self._started:
            ended.set_result(Crashed(message=f"the flow ended before phase {name} was started"))
            return
        engine = loop.create_task(drive(), name=name, context=context)
        self._own.add(engine)
        with shared.lock:
            shared.engines[engine] = loop

        def finish(done: asyncio.Task[State[Any]]) -> None:
            self._own.discard(done)
            with shared.lock:
                shared.engines.pop(done, None)
            if done.cancelled():
                ended.set_result(Crashed(message=f"phase {name} was cancelled"))
            elif (error := done.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(done.result())

        engine.add_done_callback(finish)

    def _with_remote_body(self, task: Task[..., Any]) -> Task[..., Any]:
        """Return a copy of the task whose body is awaited in an executor."""
        fn = task.fn
        fixed_s = task.timeout_seconds

        @functools.wraps(fn)
        async def body(*args: Any, **kwargs: Any) -> Any:
            return await self._run_body(task, fixed_s, args, kwargs)

        remote = copy.copy(task)
        remote.fn = body
        remote.isasync = True
        # Our deadline, not the engine's: on it the executor is killed and its death awaited.
        remote.timeout_seconds = None
        return remote

    async def _run_body(
        self,
        task: Task[..., Any],
        fixed_s: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        context = TaskRunContext.get()
        assert context is not None, "the engine enters a task run before it calls a body"
        pool, shared = self._required_pool(), self._required_shared()
        try_number = context.task_run.run_count
        if try_number > 1:
            with shared.lock:
                shared.retries[task.name] += 1
        arguments = inspect.signature(task.fn).bind(*args, **kwargs)
        key = self._put_key(task, arguments.arguments, try_number)
        deadline_s = fixed_s
        if deadline_s is None and self._options.deadline_for is not None:
            deadline_s = self._options.deadline_for(task.name)
        sink, close = shared.relay.open(context.task_run, task)
        try:
            return await pool.run(
                task.fn,
                arguments.args,
                arguments.kwargs,
                key=key,
                deadline_s=deadline_s,
                on_log=sink,
            )
        except Exception as exc:
            if try_number <= task.retries:  # the engine shows no traceback while tries are left
                _log_failed_try(context.task_run, task, exc)
            if NO_RUNNER in str(exc):  # Prefect's advice there does not fit a body
                raise RuntimeError(NESTED_SUBMIT) from exc
            raise
        finally:
            close()

    def _put_key(self, task: Task[..., Any], arguments: dict[str, Any], try_number: int) -> CallKey:
        """Return the key of this try; a parameter that is a CallKey is replaced by it.

        Its own try number is that of the task's first try.
        """
        for name, value in arguments.items():
            if isinstance(value, CallKey):
                counted_on = value.try_number + try_number - 1
                arguments[name] = replace(value, try_number=counted_on)
                return arguments[name]
        return CallKey(
            run_id=self._options.run_id,
            attempt=self._options.attempt,
            global_step=int(arguments.get("global_step", arguments.get("step", 0))),
            inner_step=int(arguments.get("inner_step", 0)),
            phase=task.name,
            try_number=try_number,
        )

    def _required_pool(self) -> ExecutorPool:
        if is_executor_process():
            raise RuntimeError(NESTED_SUBMIT)
        if self._pool is None:
            raise RuntimeError("this PhaseRunner was pickled; only the driver's runs phases")
        return self._pool

    def _required_shared(self) -> _Shared:
        if self._shared is None:
            raise RuntimeError("this PhaseRunner was pickled; only the driver's runs phases")
        return self._shared


def _log_failed_try(task_run: TaskRun, task: Task[..., Any], error: Exception) -> None:
    """Write on the task run's page why a try failed, with the traceback there."""
    remote = error.__cause__
    detail = str(error)
    if isinstance(remote, RemoteTracebackError):
        detail = f"{detail}\n{remote.args[0]}"
    logger = task_run_logger(task_run, task)
    logger.error("Try %d failed with %s: %s", task_run.run_count, type(error).__name__, detail)
