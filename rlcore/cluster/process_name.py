"""Which process on which host: enough to end it, and no other one, when it answers nobody."""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessName:
    """A process by host, number and time of birth: numbers are given again.

    Example:
        >>> ProcessName.of_this().is_alive
        True
    """

    hostname: str
    pid: int
    created: float

    @classmethod
    def of_this(cls) -> "ProcessName":
        """Return the name of the calling process."""
        created = psutil.Process().create_time()
        return cls(hostname=socket.gethostname(), pid=os.getpid(), created=created)

    @property
    def is_alive(self) -> bool:
        """Whether it is known to be there: on this host, and not dead and still listed."""
        if self.hostname != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            is_same = process.create_time() == self.created
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill(self, patience_s: float = 0.0) -> None:
        """End it if it lives on this host; a stopped process dies of that, too.

        Args:
            patience_s: How long it may take to end by itself, since it was told so.
        """
        deadline = time.monotonic() + patience_s
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
