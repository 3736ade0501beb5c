"""`rollflow doctor`: what of this machine would stop or slow a run, each finding with its fix.

    findings    what a finding is
    software    Python and packages against what the project asks for
    machine     cores, memory, shared memory, disk
    servers     Ray's token, and the servers that the environment names
    leftovers   of runs whose process died

Nothing is started, changed or ended, and nothing heavy is imported.
"""

from collections.abc import Mapping
from pathlib import Path

from rlcore.doctor.findings import Finding
from rlcore.doctor.leftovers import check_leftovers
from rlcore.doctor.machine import check_machine
from rlcore.doctor.servers import check_servers
from rlcore.doctor.software import check_software

__all__ = ["Finding", "examine_machine"]


def examine_machine(runs_root: str | Path, environment: Mapping[str, str]) -> list[Finding]:
    """Return the findings about this machine, in the order of the parts above.

    Args:
        runs_root: Folder of the runs.
        environment: Variables of this process.
    """
    root = Path(runs_root)
    return [
        *check_software(),
        *check_machine(root, environment),
        *check_servers(environment),
        *check_leftovers(root),
    ]
