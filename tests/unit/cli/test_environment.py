"""Which Prefect server a process uses. Environment variables are set in processes of their own."""

import json
import os
import subprocess
import sys

import pytest

from flows.command.environment import prefect_home, ui_environment


def prepared(tmp_path, *, first="", **environment):
    """Return the Prefect variables of a process that prepared its environment."""
    code = (
        f"{first}\n"
        "import json, os\n"
        "from flows.command.environment import prepare_prefect_environment\n"
        "answer = prepare_prefect_environment('runs')\n"
        "found = {k: v for k, v in os.environ.items() if k.startswith('PREFECT_')}\n"
        "print(json.dumps([answer, found]))\n"
    )
    given = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**given, "PYTHONPATH": path, **environment},
    )
    if result.returncode:
        raise RuntimeError(result.stderr.splitlines()[-1])
    return json.loads(result.stdout)


def test_embedded_home_is_beside_the_runs(tmp_path):
    home = str(tmp_path / "runs" / ".prefect")
    answer, found = prepared(tmp_path)
    assert answer == home
    assert found == {
        "PREFECT_HOME": home,
        "PREFECT_PROFILES_PATH": f"{home}/profiles.toml",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    }
    assert os.path.isdir(home)


def test_the_users_profile_is_not_used_but_his_settings_are(tmp_path):
    _, found = prepared(
        tmp_path,
        PREFECT_HOME="/somewhere/else",
        PREFECT_API_URL="",
        PREFECT_SERVER_ANALYTICS_ENABLED="true",
        PREFECT_LOGGING_LEVEL="ERROR",
    )
    assert found["PREFECT_HOME"] == str(tmp_path / "runs" / ".prefect")
    assert found["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
    assert found["PREFECT_LOGGING_LEVEL"] == "ERROR"
    assert "PREFECT_API_URL" not in found


def test_a_named_server_is_used_as_it_is(tmp_path):
    url = "http://127.0.0.1:4200/api"
    assert prepared(tmp_path, PREFECT_API_URL=url) == [url, {"PREFECT_API_URL": url}]
    assert not (tmp_path / "runs").exists()


def as_prefect_reads_it(tmp_path, code, **environment):
    """Run `code` in the folder with what was prepared there."""
    _, found = prepared(tmp_path, **environment)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    given = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**given, "PYTHONPATH": path, **environment, **found},
    ).stdout


READ = """
from prefect.settings import get_current_settings
s = get_current_settings()
print(s.home, s.api.url, s.server.database.connection_url.get_secret_value())
"""


def test_prefect_reads_what_was_prepared(tmp_path):
    home = tmp_path / "runs" / ".prefect"
    database = f"sqlite+aiosqlite:///{home}/prefect.db"
    assert as_prefect_reads_it(tmp_path, READ).split() == [str(home), "None", database]


def test_a_database_that_is_named_elsewhere_is_not_that_of_embedded_runs(tmp_path):
    (tmp_path / ".env").write_text("PREFECT_SERVER_DATABASE_CONNECTION_URL=sqlite+aiosqlite:///a")
    (tmp_path / "prefect.toml").write_text('[server.database]\nconnection_url = "sqlite:///b"\n')
    told = as_prefect_reads_it(
        tmp_path, READ, PREFECT_API_DATABASE_CONNECTION_URL="sqlite+aiosqlite:///c"
    )
    assert told.split()[2] == f"sqlite+aiosqlite:///{tmp_path}/runs/.prefect/prefect.db"


REFUSE = """
from flows.command.embedded_server import refuse_server_of_a_file
from rlcore.errors import ConfigError
try:
    refuse_server_of_a_file()
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".env", "PREFECT_API_URL=http://127.0.0.1:4999/api\n"),
        ("prefect.toml", '[api]\nurl = "http://127.0.0.1:4999/api"\n'),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "http://127.0.0.1:4999/api"\n'),
    ],
)
def test_a_server_that_is_named_in_a_file_is_refused_with_its_address(tmp_path, file, text):
    assert as_prefect_reads_it(tmp_path, REFUSE) == ""
    (tmp_path / file).write_text(text)
    told = as_prefect_reads_it(tmp_path, REFUSE)
    assert f"pyproject.toml in {tmp_path} names the Prefect server" in told
    assert "set PREFECT_API_URL=http://127.0.0.1:4999/api to use it" in told


def test_too_late_when_prefect_is_imported(tmp_path):
    stand_in = "import sys; sys.modules['prefect'] = sys"
    try:
        prepared(tmp_path, first=stand_in)
    except RuntimeError as error:
        assert "prefect is imported already" in str(error)
    else:
        raise AssertionError("the preparation came too late and said nothing")


def test_ui_keeps_the_rest_of_the_environment(tmp_path):
    found = ui_environment(tmp_path / "runs", 4321)
    assert found["PREFECT_HOME"] == str(prefect_home(tmp_path / "runs"))
    assert found["PREFECT_SERVER_API_PORT"] == "4321"
    assert found["PATH"] == os.environ["PATH"]
