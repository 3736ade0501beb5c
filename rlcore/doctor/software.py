"""Python and the installed packages, against what the project asks for."""

import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from packaging.requirements import Requirement

from rlcore.doctor.findings import Finding

PROJECT = "rollflow"
_LOWEST, _TOO_NEW = (3, 11), (3, 13)
_INSTALL = "install with the tested versions: `make setup`, or pip install -c constraints.txt"


def check_software() -> list[Finding]:
    """Return what Python and the packages are like."""
    return [_python(sys.version_info[:2]), *_packages()]


def _python(version: tuple[int, ...]) -> Finding:
    shown = ".".join(map(str, version))
    if _LOWEST <= version < _TOO_NEW:
        return Finding(level="ok", subject="python", message=shown)
    return Finding(
        level="error",
        subject="python",
        message=f"{shown} is not supported (3.11 and 3.12 are)",
        fix="make the environment with Python 3.11",
    )


def _packages() -> list[Finding]:
    try:
        wanted = metadata.requires(PROJECT) or []
    except metadata.PackageNotFoundError:
        return [
            Finding(
                level="error",
                subject="packages",
                message=f"{PROJECT} is not installed: workers could not import it",
                fix="pip install -e . in the project",
            )
        ]
    return compare_versions(wanted, _installed)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compare_versions(
    wanted: Iterable[str], installed: Callable[[str], str | None]
) -> list[Finding]:
    """Return one finding per package that is missing or clashes, or one that all is well.

    Args:
        wanted: Requirements as packages declare them; those of extras are left out.
        installed: Returns the version of a package, or None.
    """
    findings: list[Finding] = []
    count = 0
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            findings.append(
                Finding(
                    level="error",
                    subject=requirement.name,
                    message=(
                        f"{version or 'not installed'}, but {PROJECT} needs "
                        f"{requirement.specifier or 'it'}"
                    ),
                    fix=_INSTALL,
                )
            )
    return findings or [
        Finding(level="ok", subject="packages", message=f"all {count} in the tested ranges")
    ]
