"""Every setting of deployments/server.env is one that Prefect's server reads."""

import re
from datetime import timedelta
from pathlib import Path

from prefect.settings import Settings

FILE = Path(__file__).resolve().parents[2] / "deployments" / "server.env"


def test_the_settings_of_a_shared_server_are_read(monkeypatch, tmp_path):
    given = dict(re.findall(r'^(PREFECT_\w+)="?([^"\n]*)"?$', FILE.read_text(), re.MULTILINE))
    assert len(given) == 7
    monkeypatch.chdir(tmp_path)
    for name, value in given.items():
        monkeypatch.setenv(name, value.replace("${PREFECT_DB_PASSWORD}", "x"))
    server = Settings().server
    assert server.database.connection_url is not None
    url = server.database.connection_url.get_secret_value()
    assert url == "postgresql+asyncpg://prefect:x@127.0.0.1:5432/prefect"
    assert server.concurrency.lease_storage.endswith("lease_storage.filesystem")
    assert server.api.auth_string is not None
    assert server.api.auth_string.get_secret_value() == given["PREFECT_SERVER_API_AUTH_STRING"]
    assert server.events.retention_period == timedelta(days=14)
    vacuum = server.services.db_vacuum
    assert vacuum.enabled_vacuum_types == {"events", "flow_runs", "orphans"}
    assert vacuum.retention_period == timedelta(days=90)
    assert server.analytics_enabled is False


def test_no_secret_is_written_down():
    secrets = re.findall(r"^PREFECT_\w*(?:URL|STRING)=(.*)$", FILE.read_text(), re.MULTILINE)
    assert all("${" in secret for secret in secrets)
