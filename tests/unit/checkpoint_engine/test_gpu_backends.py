"""What `nccl` and `kimi_ckpt_engine` do besides the contract, with a CPU in place of GPUs."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import psutil
import pytest
import torch

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.buffer import WeightBuffer
from rlcore.checkpoint_engine.kimi_receiver import KimiReceiver
from rlcore.checkpoint_engine.nccl import NcclReceiver
from rlcore.checkpoint_engine.sender import SenderProcess
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.testing import kimi_on_cpu, nccl_on_cpu
from rlcore.testing.weight_source import WeightSource
from rlcore.types import CallKey

KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")
SETTINGS = TransferSettings(bucket_bytes=4 << 20, bucket_deadline_s=8.0)
KIMI = "rlcore.testing.kimi_on_cpu:Sender"


@pytest.fixture
def meta(tmp_path):
    return WeightSource(tmp_path).publish_weights(KEY)


@pytest.fixture(scope="module")
def sender() -> Iterator[SenderProcess]:
    process = SenderProcess(kimi_on_cpu.NAME, sender=KIMI)
    yield process
    process.kill()


def call(transport, place):
    """What a replica's end does first."""
    client = Client(transport["address"], authkey=bytes.fromhex(transport["authkey"]))
    client.send((transport["ticket"], place))
    return client


def until_gone(processes) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=20)[1]


def test_nccl_joins_no_device_with_itself(meta):
    receiver = nccl_on_cpu.Receiver()
    place = f"cpu of process {os.getpid()}"
    transport = SETTINGS.transport(nccl_on_cpu.NAME, place=place)
    with pytest.raises(WeightSyncError, match=rf"both on {place}, and nccl_on_cpu joins no device"):
        next(receiver.receive(replace(meta, transport=transport), WeightBuffer()))


@pytest.mark.parametrize("receiver", [NcclReceiver, KimiReceiver])
def test_a_replica_without_a_gpu_says_so(meta, receiver):
    assert not torch.cuda.is_available(), "this test is for a machine without a GPU"
    transport = SETTINGS.transport("of a GPU", place="GPU-1")
    with pytest.raises(WeightSyncError, match=rf"memory.*, and process {os.getpid()} has none"):
        next(receiver().receive(replace(meta, transport=transport), WeightBuffer()))


def test_two_replicas_on_one_device_are_refused_by_name(sender, meta):
    transports = sender.open(meta, ["a", "b"], SETTINGS)
    first = call(transports["a"], "CPU-0")
    assert first.poll(60)
    second = call(transports["b"], "CPU-0")
    with pytest.raises(EOFError):
        second.recv()
    first.close()
    with pytest.raises(WeightTransferError, match="not all is sent after 1 s to a"):
        sender.close(1.0)


def test_a_replica_that_never_answers_costs_a_deadline_and_its_server_dies_with_the_sender(meta):
    """checkpoint-engine itself would wait for it for ever."""
    sender = SenderProcess(kimi_on_cpu.NAME, sender=KIMI)
    try:
        (transport,) = sender.open(meta, ["a"], SETTINGS).values()
        with call(transport, "CPU-silent") as replica:
            assert replica.poll(60) and replica.recv().startswith("ipc://@checkpoint-engine-")
            family = psutil.Process(sender.pid).children(recursive=True)
            started = time.monotonic()
            with pytest.raises(WeightTransferError, match="not all is sent after 1 s to a"):
                sender.close(1.0)
            assert time.monotonic() - started < 10
    finally:
        sender.kill()
    assert len(family) >= 2  # who forks servers, and the server
    assert until_gone(family) == []


def test_who_does_not_know_the_key_or_comes_with_an_old_ticket_gets_nothing(sender, meta):
    (transport,) = sender.open(meta, ["a"], SETTINGS).values()
    with call({**transport, "ticket": "of yesterday"}, "CPU-1") as old, pytest.raises(EOFError):
        old.recv()
    with pytest.raises(AuthenticationError, match="digest sent was rejected"):
        call({**transport, "authkey": "00"}, "CPU-1")


def test_a_sender_that_is_gone_is_named(meta):
    transport = SETTINGS.transport(
        kimi_on_cpu.NAME, address="\0rollflow-nobody", authkey="00", ticket="t", sender_pid=7
    )
    with pytest.raises(WeightTransferError, match=r"checkpoint-engine's sender \(pid 7\) died"):
        next(kimi_on_cpu.Receiver().receive(replace(meta, transport=transport), WeightBuffer()))
