"""The one file that chooses and sets environment variables for a command.

Prefect reads its settings when it is imported, so these come first: commands call them before they
import a flow.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"

DRIVER_LOGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "rlcore,tasks,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""The driver's own warnings stand on the run's page; what belongs to no flow stays off it."""

DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
DATABASE_NAMES = (DATABASE, "PREFECT_API_DATABASE_CONNECTION_URL")
"""Prefect's names of one setting; the first counts before the second."""


def prefect_home(runs_root: str | Path) -> Path:
    """Return the folder of Prefect's embedded database: beside the runs, never the user's own."""
    return Path(runs_root).resolve() / ".prefect"


def prefect_api_url() -> str | None:
    """Return the Prefect server that the environment names, or None for the embedded one."""
    return os.environ.get("PREFECT_API_URL") or None


def prepare_prefect_environment(runs_root: str | Path) -> str:
    """Choose the Prefect server of this process, and return its URL or the embedded home.

    With PREFECT_API_URL nothing is changed. Without it Prefect starts a temporary server whose
    database lies in `<runs_root>/.prefect`. What the user has set stays as it is, the home, the
    database and the server's address excepted. Prefect also reads files of the folder it stands in
    (.env, prefect.toml, pyproject.toml), before which the environment counts; an address in one of
    them is refused once Prefect is imported (embedded_server.py).

    Raises:
        RuntimeError: Prefect was imported before, and has read the user's settings already.
    """
    url = prefect_api_url()
    if url is not None:
        return url
    home = prefect_home(runs_root)
    if "prefect" in sys.modules and os.environ.get("PREFECT_HOME") != str(home):
        raise RuntimeError("prefect is imported already; prepare its environment first")
    home.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PREFECT_API_URL", None)  # set, but empty
    os.environ.update(_embedded(home, os.environ))
    return str(home)


def foreign_databases(runs_root: str | Path) -> list[str]:
    """Return the variables that name another database than the one of embedded runs."""
    own = _database(prefect_home(runs_root))
    return [name for name in DATABASE_NAMES if os.environ.get(name, own) not in ("", own)]


def prepare_ray_environment() -> None:
    """Let this process join clusters that want a token, where the user has one.

    A driver that joins by address is refused otherwise. Ray reads the mode when it is imported:
    set later, it would reach only the processes that Ray starts, and these would refuse this one.
    """
    if "ray" in sys.modules:
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    token = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if token.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def ui_environment(runs_root: str | Path, port: int) -> dict[str, str]:
    """Return the environment of a server, with UI, over the embedded database."""
    inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return {
        **inherited,
        **_embedded(prefect_home(runs_root), inherited),
        "PREFECT_SERVER_API_HOST": LOOPBACK,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{port}/api",
    }


def deploy_environment(project: Path) -> dict[str, str]:
    """Return the environment of `prefect deploy`: prefect.yaml takes the project's folder from PWD.

    A process that was started in another folder than its parent's has the parent's PWD.
    """
    return {**os.environ, "PWD": str(project)}


def prepare_served_environment(url: str) -> None:
    """Set what runs that this process serves need; prefect.yaml sets it for workers' runs."""
    os.environ["PREFECT_API_URL"] = url
    wanted = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "PREFECT_CLIENT_MAX_RETRIES": "9"}
    for name, value in {**wanted, **DRIVER_LOGS}.items():
        os.environ.setdefault(name, value)


def _database(home: Path) -> str:
    return f"sqlite+aiosqlite:///{home}/prefect.db"


def _embedded(home: Path, given: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
        # The default of 20 s is short on a busy machine of two cores.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The console shows one line per step; everything is in the UI, and on the console with
        # PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL=INFO.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        **DRIVER_LOGS,
    }
    kept = {key: given[key] for key in wanted if key in given}
    return {
        **wanted,
        **kept,
        "PREFECT_HOME": str(home),
        # A profile file of the user's, or one named in the environment, could name a server.
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        DATABASE: _database(home),
    }
