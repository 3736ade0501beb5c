"""A process that runs user code: rlcore/isolation/pool.py starts it as `python -m`.

Messages go over private copies of stdin and stdout: what user code prints goes to stderr.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlcore.errors import ConfigError, DataError, TransientError
from rlcore.isolation.messages import LENGTH, Reply, Setup
from rlcore.user_code import load_user_modules

TRACEBACK_LINES = 12
MAX_MESSAGE_CHARACTERS = 4000
PR_SET_PDEATHSIG = 1


def write_message(stream: BinaryIO, message: object) -> None:
    """Write one message."""
    content = pickle.dumps(message)
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other side is gone.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


def main() -> None:
    """Serve tasks until the parent closes the pipe."""
    tasks, replies = _take_pipes()
    _die_with_parent()
    setup: Setup = read_message(tasks)
    try:
        load_user_modules(setup.config.trainer.user_modules)
        module, _, name = setup.factory.partition(":")
        function = getattr(importlib.import_module(module), name)(setup.config, **setup.arguments)
    except (ConfigError, DataError) as error:
        write_message(replies, Reply(status="refused", message=str(error)))
        return
    _limit_memory(setup.max_memory_mb)
    write_message(replies, Reply(status="ready", rss_mb=_rss_mb()))
    # One loop for all calls: an async function may keep a session open between them.
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while True:
            write_message(replies, call(function, read_message(tasks), runner))


def call(function: Callable[[Any], Any], task: Any, runner: asyncio.Runner) -> Reply:
    """Call the function; whatever it does becomes a reply."""
    try:
        value = function(task)
        if inspect.isawaitable(value):
            value = runner.run(_await(value))
    except DataError as error:
        return Reply(status="bad_result", message=_cut(str(error)), rss_mb=_rss_mb())
    except TransientError as error:
        return Reply(status="unavailable", message=_cut(str(error)), rss_mb=_rss_mb())
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code may raise anything
        message = _describe(error)
        del error
        gc.collect()
        return Reply(status="raised", message=message, rss_mb=_rss_mb())
    return Reply(status="done", value=value, rss_mb=_rss_mb())


async def _await(result: Any) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return _cut("\n".join(lines[-TRACEBACK_LINES:]))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else "..." + text[-MAX_MESSAGE_CHARACTERS:]


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    tasks = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return tasks, replies


def _die_with_parent() -> None:
    """A call that hangs would outlive a parent that was killed."""
    # Ctrl-C reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(max_memory_mb: int) -> None:
    """Let a call that allocates without end get a MemoryError instead of the machine."""
    if sys.platform == "linux":
        used = _status_kb()["VmData"] * 1024
        limit = used + max_memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _rss_mb() -> int:
    return _status_kb()["VmRSS"] // 1024 if sys.platform == "linux" else 0


def _status_kb() -> Mapping[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = (line.split() for line in lines if line.startswith(("VmRSS", "VmData")))
    return {name.rstrip(":"): int(value) for name, value, *_ in fields}


if __name__ == "__main__":
    main()
