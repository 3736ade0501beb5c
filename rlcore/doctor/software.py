"""Python and the installed packages, against what the project asks for."""

import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlcore.doctor.findings import Finding

PROJECT = "rollflow"
_LOWEST, _TOO_NEW = (3, 11), (3, 13)
_INSTALL = "install with the tested versions: `make setup`, or pip install -c constraints.txt"


def check_software() -> list[Finding]:
    """Return what Python and the packages are like."""
    return [python(sys.version_info[:2]), *_packages()]


def python(version: tuple[int, ...]) -> Finding:
    """Return whether this version of Python is supported."""
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
    return compare_versions(wanted, _installed, _requires)


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compare_versions(
    wanted: Iterable[str],
    installed: Callable[[str], str | None],
    requires: Callable[[str], Iterable[str]],
) -> list[Finding]:
    """Return one finding per package that is missing or clashes, or one that all is well.

    Looks at what rollflow needs, at what those packages need, and so on.

    Args:
        wanted: Requirements as packages declare them; those of extras are left out.
        installed: Returns the version of a package, or None.
        requires: Returns the requirements of a package.
    """
    findings: list[Finding] = []
    seen: set[str] = set()
    pending = [(PROJECT, text) for text in wanted]
    while pending:
        needed_by, text = pending.pop(0)
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            findings.append(
                Finding(
                    level="error",
                    subject=requirement.name,
                    message=(
                        f"{version or 'not installed'}, but {needed_by} needs "
                        f"{requirement.specifier or 'it'}"
                    ),
                    fix=_INSTALL,
                )
            )
        name = canonicalize_name(requirement.name)
        if name not in seen:
            seen.add(name)
            pending += [(requirement.name, text) for text in requires(requirement.name)]
    return findings or [
        Finding(level="ok", subject="packages", message=f"all {len(seen)} fit each other")
    ]
