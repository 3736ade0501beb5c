"""A run without heartbeats is called dead only if nothing shows that it lives or has ended."""

import asyncio
import json
import time
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.states import Completed, Running

from flows.check_heartbeat import check_heartbeat
from rlcore.trainer.run_folder import RunFolder
from tasks.attempts import this_flow_run
from tasks.silence import why_not_dead


class Client:
    """Knows one flow run, and how often it beats from the n-th look on."""

    def __init__(self, flow_run, beats_from=10**9):
        self.flow_run = flow_run
        self.beats_from = beats_from
        self.looks = 0

    async def read_flow_run(self, flow_run_id):
        assert flow_run_id == self.flow_run.id
        return self.flow_run

    async def read_events(self, wanted, limit):
        assert wanted.resource.id == [f"prefect.flow-run.{self.flow_run.id}"]
        self.looks += 1
        return SimpleNamespace(events=["a beat"] if self.looks >= self.beats_from else [])


def silent(tmp_path, state=None):
    parameters = {"preset": "grpo-tiny", "overrides": {"trainer.runs_root": str(tmp_path)}}
    return SimpleNamespace(id=uuid4(), state=state or Running(), parameters=parameters)


def begun(tmp_path, flow_run):
    folder = RunFolder.create(tmp_path / "r", run_id="r", request={})
    attempt = folder.begin_attempt(max_attempts=3, flow_run_id=str(flow_run.id))
    return folder, attempt


def asked(client, **options):
    options = {"patience_s": 0.1, "poll_s": 0.01, **options}
    return asyncio.run(why_not_dead(client, str(client.flow_run.id), **options))


def test_one_that_has_ended_is_not_dead(tmp_path):
    assert asked(Client(silent(tmp_path, state=Completed()))) == "it is Completed"


def test_one_that_beats_again_is_not_dead(tmp_path):
    client = Client(silent(tmp_path), beats_from=3)
    assert asked(client, patience_s=60) == "it beats again"
    assert client.looks == 3


def test_one_whose_folder_nobody_holds_is_dead_at_once(tmp_path):
    flow_run = silent(tmp_path)
    folder, _ = begun(tmp_path, flow_run)
    with folder.hold():
        pass
    began = time.monotonic()
    assert asked(Client(flow_run), patience_s=60) is None
    assert time.monotonic() - began < 30


def test_one_that_holds_its_folder_is_not_dead_however_long_it_is_not_heard(tmp_path):
    flow_run = silent(tmp_path)
    folder, _ = begun(tmp_path, flow_run)
    with folder.hold():
        assert asked(Client(flow_run, beats_from=3), patience_s=60) == "it beats again"
        assert asked(Client(flow_run)) == "no beat is heard, but a process holds its run folder"


def test_one_whose_attempt_has_ended_has_time_to_say_so(tmp_path):
    flow_run = silent(tmp_path)
    folder, attempt = begun(tmp_path, flow_run)
    folder.end_attempt(attempt, "finished")
    assert asked(Client(flow_run, beats_from=3), patience_s=60) == "it beats again"
    assert asked(Client(flow_run)) is None


def test_one_whose_folder_is_not_seen_here_has_time_to_beat(tmp_path):
    assert asked(Client(silent(tmp_path), beats_from=3), patience_s=60) == "it beats again"
    assert asked(Client(silent(tmp_path))) is None


def test_one_whose_preset_is_gone_is_still_heard(tmp_path, caplog):
    flow_run = silent(tmp_path)
    flow_run.name = "nightly-7"
    flow_run.parameters["preset"] = "renamed-since"
    assert asked(Client(flow_run, beats_from=3), patience_s=60) == "it beats again"
    assert asked(Client(flow_run)) is None
    assert "flow run nightly-7: its folder is not known" in caplog.text
    assert "renamed-since" in caplog.text


@pytest.mark.integration
def test_a_beat_on_a_server_is_heard_and_a_dead_run_marked(prefect_session, tmp_path):
    overrides = {"trainer.runs_root": str(tmp_path)}

    @flow(persist_result=False, validate_parameters=False)
    async def run(preset, overrides):
        return this_flow_run().flow_run_id

    async def main():
        flow_run_id = await run("grpo-tiny", overrides)
        resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}"}
        async with get_client() as client:
            await client.set_flow_run_state(flow_run_id, Running(), force=True)
            asking = asyncio.create_task(why_not_dead(client, flow_run_id, patience_s=60))
            await asyncio.sleep(0.5)
            emit_event(event="prefect.flow-run.heartbeat", resource=resource)
            assert await asking == "it beats again"
            folder = tmp_path / "r"
            RunFolder.create(folder, run_id="r", request={}).begin_attempt(
                max_attempts=3, flow_run_id=flow_run_id
            )
            state = await check_heartbeat(flow_run_id, return_state=True)
            assert state.message == "marked Crashed", json.dumps(str(state))
            assert (await client.read_flow_run(flow_run_id)).state.is_crashed()

    asyncio.run(main())
