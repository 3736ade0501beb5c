"""Log records of other processes, written under the task run they belong to.

One relay in the driver: a body's records go to its task run's page; those of workers and replicas,
marked with their source, to the page of the phase that started last.
"""

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import TaskRun
from prefect.logging.loggers import task_run_logger

from rlcore.cluster.log_stream import RecordSink, StreamRecord

LOGGER = "prefect.task_runs"
"""Its handlers write to the console and to Prefect's server."""


class LogRelay:
    """Knows the task runs that are open and writes records to them, from any thread."""

    def __init__(self) -> None:
        self._open: dict[int, RecordSink] = {}
        self._lock = threading.Lock()

    def open(
        self, task_run: TaskRun, task: Task[..., Any]
    ) -> tuple[RecordSink, Callable[[], None]]:
        """Return what writes records under `task_run`, and what ends its turn to get strays."""
        extra = dict(task_run_logger(task_run, task).extra or {})
        context = contextvars.copy_context()  # Prefect's settings (server, levels) live there

        def sink(record: StreamRecord) -> None:
            context.copy().run(_write, record, extra)

        token = id(sink)
        with self._lock:
            self._open[token] = sink

        def close() -> None:
            with self._lock:
                self._open.pop(token, None)

        return sink, close

    def write_stray(self, record: StreamRecord) -> None:
        """Write a record that belongs to no body: under the newest open task run, or locally."""
        with self._lock:
            sink = next(reversed(self._open.values()), None)
        if sink is not None:
            sink(_marked(record))
        else:
            logging.getLogger(record.name).log(record.level, "%s", _marked(record).message)


def _marked(record: StreamRecord) -> StreamRecord:
    return StreamRecord(
        source=record.source,
        call_id=record.call_id,
        name=record.name,
        level=record.level,
        created=record.created,
        message=f"[{record.source}] {record.message}",
    )


def _write(record: StreamRecord, extra: dict[str, object]) -> None:
    logger = logging.getLogger(LOGGER)
    if not logger.isEnabledFor(record.level):
        return
    logger.handle(
        logging.makeLogRecord(
            {
                **extra,
                "name": record.name,
                "msg": record.message,
                "levelno": record.level,
                "levelname": logging.getLevelName(record.level),
                "created": record.created,
                "processName": record.source,
            }
        )
    )
