"""The replica's end of `kimi_ckpt_engine`: checkpoint-engine's protocol, without the package.

It replies, the server asks, over one ZMQ socket of Unix:

    handle of memory of the GPU         "": it is mapped here
    list of what lies where in it       "": it was taken (else: what went wrong); once per bucket
    None                                "": the memory is let go
    None                                "": the end
    an exception at any time            (no answer): the server gives up

The package's own end of it has no deadlines. This one has: a server is overdue when a bucket is,
and a sending process that dies is noticed at once, by the connection to it.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import zmq

from rlcore.checkpoint_engine.base import WEIGHT_RECEIVERS
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.kimi import NAME
from rlcore.checkpoint_engine.sender import START_S
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.types import WeightMeta

FAREWELL_MS = 500
"""How long a last message may take to leave."""
_DEVICE_ARGUMENT = 6
"""Place of the device's number among the arguments of torch's handle: here it has another."""


@WEIGHT_RECEIVERS.register(NAME)
class KimiReceiver:
    """Copies buckets out of memory that a server on the same GPU shares; runs in the replica."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def place(self) -> str:
        """Return the GPU that this replica uses, by the name the package gives it.

        Raises:
            WeightSyncError: it has none.
        """
        if not torch.cuda.is_available():
            raise WeightSyncError(
                f"{NAME} shares a GPU's memory, and process {os.getpid()} has none"
            )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"GPU-{properties.uuid}"

    def map_memory(self, handle: tuple[Any, Any]) -> torch.Tensor:
        """Return the server's memory as a tensor on this replica's GPU."""
        function, arguments = handle
        own = list(arguments)
        own[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        return function(*own)

    def let_go(self) -> None:
        """Be done with memory that no tensor stands for any more."""
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the server.

        Raises:
            WeightSyncError: this replica has no GPU.
            WeightTransferError: sender or server died, stalled or failed.
        """
        if not meta.num_bytes:
            return
        with _failures(meta), _call(meta, self.place()) as sender:
            deadline_s = meta.transport["bucket_deadline_s"]
            if not sender.poll(START_S):
                raise WeightTransferError(_message(meta, f"started no server within {START_S:g} s"))
            with _Socket(self._context, sender.recv(), sender, meta, deadline_s) as socket:
                memory = self.map_memory(socket.ask())
                socket.answer()
                yield from _take(socket, memory, meta, buffer)
                del memory
                self.let_go()
                socket.answer()
                socket.ask()  # the second None
                socket.answer()


class _Socket:
    """The replying end; tells the server what went wrong when it is left early."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        sender: Connection,
        meta: WeightMeta,
        deadline_s: float,
    ) -> None:
        self._meta, self._deadline_s = meta, deadline_s
        self._socket = context.socket(zmq.REP)
        self._socket.connect(address)
        self._sender = sender
        self._owes_answer = False

    def __enter__(self) -> "_Socket":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if kind is not None and self._owes_answer:
            self._socket.send_string(f"{kind.__name__}: {error}", zmq.NOBLOCK)
        self._socket.close(linger=FAREWELL_MS)

    def ask(self) -> Any:
        """Return what the server says next.

        Raises:
            WeightTransferError: it gave up, or nothing came in time.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._sender.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(int(self._deadline_s * 1000)))
        if self._socket not in ready:
            # The sending process says nothing any more: what is there to read is its end.
            how = "died" if ready else f"is silent for {self._deadline_s:g} s"
            raise WeightTransferError(_message(self._meta, how))
        said = self._socket.recv_pyobj()
        if isinstance(said, Exception):
            raise WeightTransferError(_message(self._meta, f"gave up: {said}"))
        self._owes_answer = True
        return said

    def answer(self) -> None:
        """Say that it is done."""
        self._socket.send(b"")
        self._owes_answer = False


def _take(
    socket: _Socket, memory: torch.Tensor, meta: WeightMeta, buffer: WeightBuffer
) -> Iterator[Bucket]:
    target = torch.from_numpy(buffer.data)
    buckets = split_buckets(meta.num_bytes, meta.transport["bucket_bytes"])
    while (items := socket.ask()) is not None:
        for item in items:
            bucket = buckets[int(item["name"])]
            piece = memory[item["offset"] : item["offset"] + bucket.num_bytes]
            target[bucket.start : bucket.end].copy_(piece)
            buffer.filled(bucket)
            yield bucket
        socket.answer()


@contextmanager
def _call(meta: WeightMeta, place: str) -> Iterator[Connection]:
    transport = meta.transport
    with Client(transport["address"], authkey=bytes.fromhex(transport["authkey"])) as sender:
        sender.send((transport["ticket"], place))
        yield sender


@contextmanager
def _failures(meta: WeightMeta) -> Iterator[None]:
    """Name the transfer in what its libraries raise."""
    try:
        yield
    except (OSError, EOFError, multiprocessing.AuthenticationError, zmq.ZMQError) as error:
        how = f"died: {type(error).__name__}: {error}"
        raise WeightTransferError(_message(meta, how)) from error


def _message(meta: WeightMeta, how: str) -> str:
    sender = meta.transport["sender_pid"]
    return f"weight version {meta.version}: checkpoint-engine's sender (pid {sender}) {how}"
