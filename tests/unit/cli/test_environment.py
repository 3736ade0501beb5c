"""Which Prefect server a process uses. Environment variables are set in processes of their own."""

import json
import os
import subprocess
import sys

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


def test_prefect_reads_what_was_prepared(tmp_path):
    code = "from prefect.settings import get_current_settings as s; print(s().home, s().api.url)"
    _, found = prepared(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}, **found},
    )
    assert result.stdout.split() == [str(tmp_path / "runs" / ".prefect"), "None"]


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
