"""The tiny project that runs of the integration tests work in; commands as children."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from real_parts.processes import free_port


@dataclass(frozen=True)
class Project:
    """A folder with the tiny model and data, in which commands run."""

    root: Path
    free_port = staticmethod(free_port)

    def environment(self, **extra: str) -> dict[str, str]:
        # Neither the user's Prefect nor the one of this pytest run.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))}
        return {**kept, "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.root / "tmp"), **extra}

    def start(
        self, *arguments: str, module: str = "flows.cli", **extra: str
    ) -> subprocess.Popen[str]:
        """Start `rollflow ARGUMENTS` in the project."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.root,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, process: "subprocess.Popen[str]", beginning: str) -> list[psutil.Process]:
        """Read the console up to a line; return the processes that then belong to the run."""
        output = []
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith(beginning):
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
