"""A process is ended by its name, and no other one."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil

from rlcore.cluster.process_name import ProcessName


def test_it_ends_that_process_even_a_stopped_one():
    this = ProcessName.of_this()
    assert this.is_alive and this.pid == os.getpid()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        created = psutil.Process(child.pid).create_time()
        name = replace(this, pid=child.pid, created=created)
        for other in (replace(name, created=created - 5), replace(name, hostname="elsewhere")):
            assert not other.is_alive
            other.kill()
        assert child.poll() is None
        os.kill(child.pid, signal.SIGSTOP)
        name.kill()
        assert child.wait(10) == -signal.SIGKILL
        assert not name.is_alive
        name.kill()


def test_one_that_was_told_to_end_may_do_so_by_itself_in_time():
    code = "import sys, time; time.sleep(0.2); sys.exit(7)"
    for patience_s, end in ((30.0, 7), (0.0, -signal.SIGKILL)):
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            created = psutil.Process(child.pid).create_time()
            replace(ProcessName.of_this(), pid=child.pid, created=created).kill(patience_s)
            assert child.wait(10) == end
