"""Attaching to a queue has a deadline, whatever the library of its storage waits for; no Ray."""

import threading
from types import SimpleNamespace

import pytest

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.errors import DeadlineExceededError

CONFIG = SimpleNamespace(backend=SimpleNamespace(storage_backend="MooncakeStore"))


class Client:
    """A library's client that notes its end."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Slow(QueueClient):
    """Attaches when it is told to."""

    def __init__(self, deadline_s):
        super().__init__(deadline_s)
        self.go, self.client = threading.Event(), Client()

    def _connect(self, config):
        assert self.go.wait(20)
        return self.client


def test_an_attachment_that_hangs_is_overdue_and_is_closed_when_it_comes_late():
    queue = Slow(deadline_s=0.2)
    with pytest.raises(
        DeadlineExceededError, match=r"waited 0\.2 s to attach to the TransferQueue's Mooncake"
    ):
        queue._connect_in_time(CONFIG)
    assert not queue.client.closed.is_set()
    queue.go.set()
    assert queue.client.closed.wait(10)


def test_one_that_comes_in_time_is_used():
    queue = Slow(deadline_s=20)
    queue.go.set()
    assert queue._connect_in_time(CONFIG) is queue.client
    assert not queue.client.closed.is_set()
