"""Where the records of workers and replicas go, which belong to no phase's body."""

import contextlib
import logging
from uuid import uuid4

import pytest
from prefect import task
from prefect.client.schemas.objects import TaskRun

from rlcore.cluster.log_stream import StreamRecord
from tasks.log_relay import LOGGER, LogRelay

pytestmark = pytest.mark.usefixtures("prefect_session")


@task
def phase():
    """Do nothing."""


def record(message, level=logging.WARNING):
    return StreamRecord(
        source="replica-0", call_id="", name="rlcore.rollout.server", level=level, created=1.5,
        message=message,
    )  # fmt: skip


class Kept(logging.Handler):
    """Keeps what a logger writes."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@contextlib.contextmanager
def kept(name):
    handler = Kept()
    logging.getLogger(name).addHandler(handler)
    try:
        yield handler.records
    finally:
        logging.getLogger(name).removeHandler(handler)


def opened(relay):
    run = TaskRun(task_key="phase", dynamic_key="0", flow_run_id=uuid4())
    _, close = relay.open(run, phase)
    return str(run.id), close


def test_a_stray_record_is_written_marked_under_the_newest_open_task_run():
    relay = LogRelay()
    first, close_first = opened(relay)
    second, close_second = opened(relay)
    with kept(LOGGER) as records:
        relay.write_stray(record("woken by request 7"))
        close_second()
        relay.write_stray(record("dead"))
        close_first()
    assert [(str(r.task_run_id), r.getMessage(), r.name, r.created) for r in records] == [
        (second, "[replica-0] woken by request 7", "rlcore.rollout.server", 1.5),
        (first, "[replica-0] dead", "rlcore.rollout.server", 1.5),
    ]


def test_between_phases_a_stray_record_is_written_to_the_drivers_own_log():
    relay = LogRelay()
    _, close = opened(relay)
    close()
    with kept("rlcore.rollout.server") as records, kept(LOGGER) as of_tasks:
        relay.write_stray(record("the engine failed", logging.ERROR))
    assert [(r.levelname, r.getMessage()) for r in records] == [
        ("ERROR", "[replica-0] the engine failed")
    ]
    assert of_tasks == []
