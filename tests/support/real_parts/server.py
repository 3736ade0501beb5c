"""A Prefect server that tests ask and tell things; its database is SQLite where they read it."""

import asyncio
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.objects import State
from real_parts.processes import free_port

T = TypeVar("T")
SECRET = "prefect:only-for-this-test"


class ServerOfTests:
    """A server on loopback, with authentication.

    Args:
        home: Folder with the server's home `prefect`, and logs of what runs beside it.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"

    def query(self, sql: str, *values: str) -> list[tuple]:
        """Read the server's database."""
        with sqlite3.connect(self.home / "prefect" / "prefect.db", timeout=30) as database:
            return database.execute(sql, values).fetchall()

    def ask(self, question: Callable[[PrefectClient], Awaitable[T]]) -> T:
        """Ask the server something by Prefect's client, in this process."""

        async def asked() -> T:
            async with PrefectClient(self.url, auth_string=SECRET) as client:
                return await question(client)

        return asyncio.run(asked())

    def start_run(self, deployment: str, name: str | None = None, **parameters: Any) -> str:
        """Start a run of a deployment; return the flow run's id."""

        async def made(client: PrefectClient) -> str:
            found = await client.read_deployment_by_name(deployment)
            run = await client.create_flow_run_from_deployment(
                found.id, parameters=parameters, name=name
            )
            return str(run.id)

        return self.ask(made)

    def limit(self, *, pool: str | None = None, deployment: str | None = None, to: int) -> None:
        """Set how many runs of a work pool or a deployment may run at a time."""

        async def put(client: PrefectClient) -> None:
            if pool is not None:
                await client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=to))
            if deployment is not None:
                found = await client.read_deployment_by_name(deployment)
                await client.update_deployment(found.id, DeploymentUpdate(concurrency_limit=to))

        self.ask(put)

    def set_state(self, flow_run_id: str, *states: State) -> None:
        """Put a flow run into states, one after the other."""

        async def put(client: PrefectClient) -> None:
            for state in states:
                await client.set_flow_run_state(UUID(flow_run_id), state, force=True)

        self.ask(put)

    def resume(self, flow_run_id: str, **run_input: str) -> None:
        """Resume a paused or suspended flow run."""
        self.ask(lambda client: client.resume_flow_run(UUID(flow_run_id), run_input or None))

    def flow_runs(self, flow: str) -> list[dict]:
        """Return id, name, state and parameters of all runs of a flow, oldest first."""
        rows = self.query(
            "select r.id, r.name, r.state_name, r.parameters from flow_run r join flow f on "
            "r.flow_id = f.id where f.name = ? order by r.created",
            flow,
        )
        names = ("id", "name", "state", "parameters")
        return [dict(zip(names, [*row[:3], json.loads(row[3])], strict=True)) for row in rows]

    def state_of(self, flow_run_id: str) -> str:
        ((state,),) = self.query("select state_name from flow_run where id = ?", flow_run_id)
        return state

    def logs_of(self, flow_run_id: str) -> str:
        """Return the log that the page of a flow run shows."""
        rows = self.query(
            "select message from log where flow_run_id = ? order by timestamp", flow_run_id
        )
        return "\n".join(message for (message,) in rows)

    def until(self, what: str, true, timeout_s: float = 300):
        """Wait until `true()` returns something; fail with the logs otherwise."""
        deadline = time.monotonic() + timeout_s
        while not (found := true()):
            logs = "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in self.home.glob("*.log"))
            assert time.monotonic() < deadline, f"{what}\n{logs}"
            time.sleep(0.5)
        return found

    def until_state(self, flow: str, state: str, index: int = -1, timeout_s: float = 300) -> dict:
        """Wait until a run of a flow has a state; return the run."""

        def found():
            runs = self.flow_runs(flow)
            return next((run for run in runs[index:][:1] if run["state"] == state), None)

        return self.until(f"{flow} is not {state}: {self.flow_runs(flow)}", found, timeout_s)
