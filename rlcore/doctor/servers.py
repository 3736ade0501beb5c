"""Ray's token, and the servers that the environment names: whether they answer."""

import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rlcore.doctor.findings import Finding

DEADLINE_S = 3.0
_RAY_PORT = 6379


def check_servers(environment: Mapping[str, str]) -> list[Finding]:
    """Return what the servers are like; each is asked for DEADLINE_S seconds at most."""
    return [ray_token(environment), prefect_server(environment), ray_cluster(environment)]


def ray_token(environment: Mapping[str, str]) -> Finding:
    """Whether clusters that want a token can be joined, and whether the token is a secret."""
    mode = environment.get("RAY_AUTH_MODE", "")
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if environment.get("RAY_AUTH_TOKEN"):
        return Finding(level="ok", subject="ray token", message="in RAY_AUTH_TOKEN")
    if not path.is_file():
        if mode == "token" or named:
            return Finding(
                level="error",
                subject="ray token",
                message=f"{path} is missing: no cluster can be started or joined",
                fix="write it (`ray get-auth-token --generate`), or unset RAY_AUTH_MODE",
            )
        return Finding(
            level="ok", subject="ray token", message="none yet: a local cluster makes its own"
        )
    if path.stat().st_mode & 0o077:
        return Finding(
            level="warning",
            subject="ray token",
            message=f"{path} can be read by others; who has it can run code as you",
            fix=f"chmod 600 {path}",
        )
    if mode and mode != "token":
        return Finding(
            level="warning",
            subject="ray token",
            message=f"RAY_AUTH_MODE={mode}: Ray listens on all interfaces and asks nobody",
            fix="unset RAY_AUTH_MODE where others reach this machine",
        )
    return Finding(level="ok", subject="ray token", message=str(path))


def prefect_server(environment: Mapping[str, str]) -> Finding:
    """Whether the Prefect server that the environment names answers."""
    url = environment.get("PREFECT_API_URL", "")
    if not url:
        return Finding(
            level="ok", subject="prefect", message="embedded server (PREFECT_API_URL is not set)"
        )
    if urlsplit(url).scheme not in {"http", "https"}:
        return Finding(
            level="error",
            subject="prefect",
            message=f"PREFECT_API_URL={url} is no http address",
            fix="set it to http://HOST:4200/api, or unset it for the embedded server",
        )
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=DEADLINE_S):
            return Finding(level="ok", subject="prefect", message=f"{url} answers")
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Finding(
            level="error",
            subject="prefect",
            message=f"PREFECT_API_URL={url} does not answer: {error}",
            fix="start it (`prefect server start`), or unset PREFECT_API_URL",
        )


def ray_cluster(environment: Mapping[str, str]) -> Finding:
    """Whether the cluster in RAY_ADDRESS can be reached."""
    address = environment.get("RAY_ADDRESS", "")
    if not address or address in {"auto", "local"}:
        return Finding(level="ok", subject="ray", message="local cluster (RAY_ADDRESS names none)")
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = parts.hostname or "", parts.port or _RAY_PORT
        with socket.create_connection((host, port), timeout=DEADLINE_S):
            return Finding(level="ok", subject="ray", message=f"{address} accepts connections")
    except (OSError, ValueError) as error:
        return Finding(
            level="error",
            subject="ray",
            message=f"RAY_ADDRESS={address} does not answer: {error}",
            fix="start the cluster (`ray start --head`), or unset RAY_ADDRESS",
        )
