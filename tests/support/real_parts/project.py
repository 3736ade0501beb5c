"""The tiny project that runs of the integration tests work in; commands as children."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from real_parts.processes import free_port

REFERENCE_STEPS = 3
REFERENCE = (
    f"trainer.total_training_steps={REFERENCE_STEPS}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "actor_rollout_ref.rollout.full_determinism=True",
    "seed=5",
)
"""A run of `grpo-tiny` that others are compared with, bit for bit."""


@dataclass(frozen=True)
class Project:
    """A folder with the tiny model and data, in which commands run.

    Attributes:
        root: The folder.
        joins: Arguments of trainings that name servers which are there already.
        variables: Of the environment of all commands.
    """

    root: Path
    joins: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    free_port = staticmethod(free_port)

    def environment(self, **extra: str) -> dict[str, str]:
        # Neither the user's Prefect nor the one of this pytest run.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))}
        own = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(self.root / "tmp")}
        return {**kept, **own, **self.variables, **extra}

    def start(
        self, *arguments: str, module: str = "flows.cli", **extra: str
    ) -> subprocess.Popen[str]:
        """Start `rollflow ARGUMENTS` in the project."""
        joins = self.joins if arguments[0] == "train" else ()
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments, *joins],
            cwd=self.root,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(
        self, process: "subprocess.Popen[str]", beginning: str, *, freeze: bool = False
    ) -> list[psutil.Process]:
        """Read the console up to a line; return the processes that then belong to the run.

        Args:
            process: Of the command.
            beginning: Of the line.
            freeze: Stop the command there: a tiny step is over before its processes are listed.
        """
        output = []
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith(beginning):
                if freeze:
                    process.send_signal(signal.SIGSTOP)
                return psutil.Process(process.pid).children(recursive=True)
        pytest.fail(f"the run ended before {beginning!r}:\n" + "".join(output)[-4000:])

    def run(self, *arguments: str, timeout_s: float = 200, **extra: str) -> tuple[int, str]:
        """Run `rollflow ARGUMENTS` to its end; return exit code and output."""
        process = self.start(*arguments, **extra)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{arguments} did not end within {timeout_s} s:\n{output[-4000:]}")
        finally:
            # Also where pytest gives the test up: the next one needs the devices.
            if process.poll() is None:
                process.kill()
                process.wait()
        return process.returncode, output
