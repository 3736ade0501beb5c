"""A shared server as deployments/server.env sets it up: PostgreSQL, leases in files, a password.

PostgreSQL refuses to run as root: there it runs as the user that Debian's package makes.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

pytestmark = [pytest.mark.integration, pytest.mark.postgres]

DEBIAN = Path("/usr/lib/postgresql")
USER = "postgres"
DATABASE_PASSWORD = "of-the-database"
READY_S = 60


@dataclass(frozen=True)
class Postgres:
    """A PostgreSQL server with the database `prefect` of the user of that name."""

    binaries: Path
    folder: Path
    port: int

    def ask(self, sql: str) -> list[str]:
        """Return the rows of a query, columns separated by `|`."""
        done = subprocess.run(
            [self.binaries / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "prefect",
             "-d", "prefect", "-At", "-c", sql],
            env={**os.environ, "PGPASSWORD": DATABASE_PASSWORD},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def until_ready(binaries, connection, log):
    ends = time.monotonic() + READY_S
    command = [binaries / "pg_isready", "-q", *connection]
    while subprocess.run(command, check=False).returncode != 0:
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def postgres(find_port):
    versions = sorted(DEBIAN.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    assert versions, f"no PostgreSQL in {DEBIAN}: `make setup-system` installs it"
    binaries, port = versions[-1].parent, find_port()
    # Not in pytest's folder, into which no other user may look.
    folder = Path(tempfile.mkdtemp(prefix="rollflow-postgres-"))
    who = {}
    if os.getuid() == 0:
        user = pwd.getpwnam(USER)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)
    password = folder / "password"
    password.write_text(DATABASE_PASSWORD)
    password.chmod(0o644)
    data = folder / "data"
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "prefect", "--pwfile", password,
         "-A", "scram-sha-256", "--no-sync"],
        cwd=folder, check=True, capture_output=True, timeout=60, **who,
    )  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", folder, "-p", str(port),
             "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
            cwd=folder, stdout=log, stderr=log, **who,
        )  # fmt: skip
    try:
        connection = ["-h", "127.0.0.1", "-p", str(port), "-U", "prefect"]
        until_ready(binaries, connection, folder / "log")
        subprocess.run(
            [binaries / "createdb", *connection, "prefect"],
            env={**os.environ, "PGPASSWORD": DATABASE_PASSWORD}, check=True, timeout=30,
        )  # fmt: skip
        yield Postgres(binaries, folder, port)
    finally:
        server.send_signal(signal.SIGINT)  # fast: it does not wait for its clients
        server.wait(timeout=30)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def site(make_site, postgres):
    return make_site(
        settings="deployments/server.env",
        PREFECT_DB_PASSWORD=DATABASE_PASSWORD,
        PREFECT_DB_ADDRESS=f"127.0.0.1:{postgres.port}",
    )


def test_nobody_calls_the_server_without_the_password(site):
    request = urllib.request.Request(f"{site.env['PREFECT_API_URL']}/flows/count", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 401


def test_a_training_is_recorded_in_postgresql(site, postgres):
    site.rollflow("train", "grpo-tiny", "trainer.total_training_steps=2", "trainer.logger=[file]")
    assert [a["outcome"] for a in site.attempts()] == ["finished"]
    pages = postgres.ask(
        "select name, state_name from flow_run where name like 'step-%' order by name"
    )
    assert pages == ["step-0001|Completed", "step-0002|Completed"]
    phases = postgres.ask("select name, state_name from task_run where name like 'step-0002/%'")
    assert "step-0002/update_actor|Completed" in phases
    assert {phase.split("|")[1] for phase in phases} == {"Completed"}
    keys = postgres.ask("select distinct key from artifact where key is not null")
    assert {"metrics", "generations", "curve-reward", "checkpoint"} <= set(keys)
    assert not (site.home / "prefect" / "prefect.db").exists()


def test_a_slot_that_a_run_holds_is_kept_in_a_file(site):
    leases = site.home / "prefect" / "concurrency_leases"

    async def held(client):
        limit = GlobalConcurrencyLimitCreate(name="x", limit=1)
        await client.create_global_concurrency_limit(limit)
        await client.increment_concurrency_slots_with_lease(
            ["x"], slots=1, mode="concurrency", lease_duration=60
        )

    assert not leases.exists() or not list(leases.glob("*-*.json"))
    site.ask(held)
    assert len(list(leases.glob("*-*.json"))) == 1
