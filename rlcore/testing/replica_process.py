"""A replica in a process of its own without Ray: for tests that kill, stop or starve receivers.

The process holds a real `LLMServer` round an engine that scripts its tokens and keeps real tensors.
Its client is a name and an address, so that any process may use it.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal

import torch

from rlcore.checkpoint_engine.buffer import Bucket, split_buckets
from rlcore.errors import ActorUnavailableError, DeadlineExceededError, WeightTransferError
from rlcore.rollout.server import LLMServer, ServerDeadlines
from rlcore.rollout.staged_weights import StagedWeights
from rlcore.testing import kimi_on_cpu, nccl_on_cpu
from rlcore.testing.scripted_engine import ScriptedEngine
from rlcore.types import CallKey, TokenOutput, WeightMeta

# Forked from a server that has imported all this: a replica starts in a fraction of a second.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

STAND_INS = (kimi_on_cpu, nccl_on_cpu)
"""Importing these registers them, here and in the tests."""

BREAKS = 666
"""A request whose prompt begins with this token breaks the engine."""

TensorSpec = tuple[str, str, tuple[int, ...], str | None]
"""Name, type, shape, and the name of the tensor it is tied to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that happens once, when a bucket has come."""

    at: Literal["first", "middle", "last"]
    action: Literal["kill", "stop", "refuse", "load_error", "kill_sender", "stop_sender", "wait"]
    """`wait`: go on when the file of `until` exists."""
    until: str = ""
    spare: int = 0
    """Process that is no sender to be killed: the tests' own."""


class TensorEngine(ScriptedEngine):
    """Scripts its tokens, and receives weights as a real engine does."""

    def __init__(self, specs: list[TensorSpec], **options: Any) -> None:
        super().__init__(**options)
        self.model = torch.nn.Module()
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, shape, tied_to in specs:
            new = torch.zeros(shape, dtype=getattr(torch, dtype))
            tensors[name] = tensors[tied_to] if tied_to else new
            self.model.register_buffer(name, tensors[name])
        self.fault: Fault | None = None
        self._weights = StagedWeights(self.model, self._on_bucket)

    def stage_weights(self, meta: WeightMeta) -> str:
        """Receive the weights."""
        found = self._weights.stage(meta)
        self._staged = meta.version
        return found

    def commit_weights(self, version: int) -> None:
        """Use the received weights."""
        self._weights.commit(version)
        super().commit_weights(version)

    def _on_bucket(self, meta: WeightMeta, bucket: Bucket) -> None:
        fault = self.fault
        last = len(split_buckets(meta.num_bytes, meta.transport["bucket_bytes"])) - 1
        place = {"first": 0, "middle": (last + 1) // 2, "last": last}
        if fault is None or bucket.index != place[fault.at]:
            return
        self.fault = None
        match fault.action:
            case "refuse":
                raise WeightTransferError("refused, as asked")
            case "load_error":
                raise OSError(f"bucket {bucket.index} cannot be loaded, as asked")
            case "wait":
                while not Path(fault.until).exists():
                    time.sleep(0.01)
            case "kill" | "stop":
                os.kill(os.getpid(), _signal(fault.action))
            case "kill_sender" | "stop_sender":
                sender_pid = meta.transport["sender_pid"]
                if sender_pid == fault.spare:
                    raise WeightTransferError("the sender that was to be killed never came so far")
                os.kill(sender_pid, _signal(fault.action))


def _signal(action: str) -> signal.Signals:
    return signal.SIGKILL if action.startswith("kill") else signal.SIGSTOP


@dataclass(kw_only=True, slots=True)
class ReplicaProcess:
    """Client of one such process; picklable. Every call opens a connection of its own."""

    name: str
    address: str
    pid: int
    deadline_s: float = 20.0

    def prepare_weights(self, key: CallKey, version: int) -> None:
        """See LLMServer."""
        self.call("prepare_weights", key, version)

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """See LLMServer."""
        return self.call("load_weights", key, meta)

    def commit_weights(self, key: CallKey, version: int) -> None:
        """See LLMServer."""
        self.call("commit_weights", key, version)

    def abandon_weights(self, key: CallKey, version: int) -> None:
        """See LLMServer."""
        self.call("abandon_weights", key, version)

    def committed_weights(self) -> WeightMeta | None:
        """See LLMServer."""
        return self.call("committed_weights")

    def abort(self, key: CallKey) -> object:
        """See LLMServer."""
        return self.call("abort", key)

    def resume(self, key: CallKey) -> None:
        """See LLMServer."""
        self.call("resume", key)

    def sleep(self, key: CallKey) -> None:
        """See LLMServer."""
        self.call("sleep", key)

    def wake_up(self, key: CallKey) -> None:
        """See LLMServer."""
        self.call("wake_up", key)

    def health(self, deadline_s: float = 10.0) -> dict[str, Any]:
        """See LLMServer."""
        return self.call("health", deadline_s=deadline_s)

    def wait_ready(self, deadline_s: float) -> None:
        """See LLMServer."""
        self.call("wait_ready", deadline_s, deadline_s=deadline_s)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See LLMServer."""
        return await asyncio.to_thread(
            self.call, "generate", request_id, prompt_ids, sampling_params
        )

    async def partial(self, request_id: str) -> TokenOutput | None:
        """See LLMServer."""
        return await asyncio.to_thread(self.call, "partial", request_id)

    def set_fault(self, fault: Fault | None) -> None:
        """Let a fault happen in the next load."""
        self.call("_set_fault", fault)

    def weights(self) -> dict[str, bytes]:
        """Return the bytes of every tensor in use."""
        return self.call("_weights")

    def kill(self) -> None:
        """End the process, also a stopped one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method of the process's server.

        Raises:
            ActorUnavailableError: the process is dead.
            DeadlineExceededError: no answer in time.
        """
        deadline_s = deadline_s or self.deadline_s
        try:
            with Client(self.address, "AF_UNIX") as connection:
                connection.send((method, args))
                if not connection.poll(deadline_s):
                    raise DeadlineExceededError(
                        f"{self.name}.{method} did not answer within {deadline_s:g} s"
                    )
                is_error, answer = connection.recv()
        except (EOFError, ConnectionError, FileNotFoundError):
            raise ActorUnavailableError(f"{self.name}.{method}: the process is gone") from None
        if is_error:
            raise answer
        return answer


def start_replica_process(
    name: str,
    folder: Path,
    specs: list[TensorSpec],
    *,
    deadlines: ServerDeadlines | None = None,
    step_s: float = 0.0,
    deadline_s: float = 20.0,
) -> ReplicaProcess:
    """Start a replica and wait until it answers; end it with `kill`.

    Args:
        name: In messages, and of its socket in `folder`.
        folder: Its path must be short: a socket's address has 108 bytes at most.
        specs: Tensors of its model, zero at first.
        deadlines: Of its server.
        step_s: How long a step of its engine takes.
        deadline_s: Of the client's calls.
    """
    # A replica that is killed and started again has the same name and another socket.
    number = len(list(folder.glob(f"{name}-*.sock")))
    address = str(folder / f"{name}-{number}.sock")
    arguments = (name, address, specs, deadlines or ServerDeadlines(), step_s)
    process = PROCESSES.Process(target=_serve, args=arguments, name=name, daemon=True)
    process.start()
    ends = time.monotonic() + 150
    while not Path(address).exists():
        if not process.is_alive() or time.monotonic() > ends:
            raise ActorUnavailableError(f"{name} did not start: exit code {process.exitcode}")
        time.sleep(0.01)
    assert process.pid is not None
    replica = ReplicaProcess(name=name, address=address, pid=process.pid, deadline_s=deadline_s)
    while True:
        try:
            replica.call("health")
        except ActorUnavailableError:
            # A socket has its name a moment before it can be called.
            if not process.is_alive() or time.monotonic() > ends:
                raise
            time.sleep(0.01)
        else:
            return replica


def _serve(
    name: str, address: str, specs: list[TensorSpec], deadlines: ServerDeadlines, step_s: float
) -> None:
    engine = TensorEngine(specs, max_num_seqs=64, step_s=step_s, breaks_on=BREAKS)
    server = LLMServer(lambda: engine, run_id="run", name=name, deadlines=deadlines)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with Listener(address, "AF_UNIX", backlog=256) as listener:
        while True:
            connection = listener.accept()
            arguments = (connection, server, engine, loop)
            threading.Thread(target=_answer, args=arguments, daemon=True).start()


def _answer(
    connection: Connection,
    server: LLMServer,
    engine: TensorEngine,
    loop: asyncio.AbstractEventLoop,
) -> None:
    method, args = connection.recv()
    with contextlib.suppress(BrokenPipeError), connection:
        try:
            if method == "_set_fault":
                engine.fault = args[0]
                answer = None
            elif method == "_weights":
                answer = _bytes_of(engine.model)
            else:
                call = getattr(server, method)(*args)
                answer = asyncio.run_coroutine_threadsafe(call, loop).result()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's answer
            connection.send((True, error))
        else:
            connection.send((False, answer))


def _bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    state: Mapping[str, torch.Tensor] = model.state_dict()
    flat = {name: tensor.contiguous().flatten() for name, tensor in state.items()}
    return {name: t.view(torch.uint8).numpy().tobytes() for name, t in flat.items()}
