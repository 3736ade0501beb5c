"""Which run a flow run is an attempt of; whether a crashed one is continued. No engine needed."""

import asyncio
import json
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, Crashed

from rlcore.config import load_config
from tasks.attempts import run_of_flow_run, runs_in
from tasks.continuation import Continuation, continue_attempt, find_continuation
from tasks.lineage import lineage_markdown
from tasks.retraining import outcomes_of, remember_outcomes, remembered_outcomes


def run_folder(root, run_id, *attempts):
    folder = root / "runs" / run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "attempts": list(attempts)}))
    return folder


class Client:
    """Knows some flow runs, and what was created."""

    def __init__(self, *flow_runs):
        self.flow_runs = {flow_run.id: flow_run for flow_run in flow_runs}
        self.created = []

    async def read_flow_run(self, flow_run_id):
        if flow_run_id not in self.flow_runs:
            raise ObjectNotFound(Exception("404"))
        return self.flow_runs[flow_run_id]

    async def create_flow_run_from_deployment(self, deployment_id, **options):
        self.created.append((deployment_id, options))
        return SimpleNamespace(name=options["name"])


def crashed(tmp_path, state=None, deployment=True, **overrides):
    return SimpleNamespace(
        id=uuid4(),
        name="quick-fox",
        state=state or Crashed(message="killed"),
        deployment_id=UUID(int=1) if deployment else None,
        parameters={
            "preset": "grpo-tiny",
            "overrides": {"trainer.runs_root": str(tmp_path / "runs"), **overrides},
        },
    )


def found(flow_run, client=None):
    return asyncio.run(find_continuation(client or Client(flow_run), str(flow_run.id)))


@pytest.mark.parametrize("outcome", ["crashed", "terminated", None])
def test_an_attempt_that_a_fault_ended_is_continued_once(tmp_path, outcome):
    flow_run = crashed(tmp_path, **{"trainer.max_attempts": 5})
    attempt = {"flow_run_id": str(flow_run.id)} | ({"outcome": outcome} if outcome else {})
    run_folder(tmp_path, "run-7", {"flow_run_id": "other", "outcome": "crashed"}, attempt)
    client = Client(flow_run)
    continuation = found(flow_run, client)
    assert isinstance(continuation, Continuation)
    assert (continuation.run_id, continuation.attempts, continuation.max_attempts) == (
        "run-7",
        2,
        5,
    )
    for _ in range(2):
        asyncio.run(continue_attempt(client, continuation))
    (deployment, first), (_, second) = client.created
    assert deployment == UUID(int=1)
    assert first["parameters"] == {**flow_run.parameters, "resume": "run-7"}
    assert first["name"] == "run-7-attempt-3"
    # The server makes one flow run of a key.
    assert first["idempotency_key"] == second["idempotency_key"] == f"continue-{flow_run.id}"


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "finished"])
def test_users_errors_and_persons_cancels_are_not_continued(tmp_path, outcome):
    flow_run = crashed(tmp_path)
    run_folder(tmp_path, "run-7", {"flow_run_id": str(flow_run.id), "outcome": outcome})
    assert found(flow_run) == f"the attempt of run run-7 is {outcome}"


def test_what_went_on_already_is_left_alone(tmp_path):
    flow_run = crashed(tmp_path)
    mine = {"flow_run_id": str(flow_run.id), "outcome": "crashed"}
    run_folder(tmp_path, "run-7", mine, {"flow_run_id": "later"})
    assert found(flow_run) == "run run-7 went on already, with attempt 2"


def test_why_nothing_is_continued_is_said(tmp_path):
    assert "is Completed, not Crashed" in found(crashed(tmp_path, state=Completed()))
    assert "is no deployment's" in found(crashed(tmp_path, deployment=False))
    assert "crashed before its run began" in found(crashed(tmp_path))
    stranger = crashed(tmp_path)
    assert "there is no flow run" in found(stranger, Client())


def test_a_run_is_found_by_any_of_its_attempts(tmp_path):
    run_folder(tmp_path, "run-1", {"flow_run_id": "a"}, {"flow_run_id": "b"})
    run_folder(tmp_path, "run-2", {})  # of an older version
    local = tmp_path / "elsewhere"
    local.mkdir()
    (local / "run.json").write_text(
        json.dumps({"run_id": "run-3", "attempts": [{"flow_run_id": "c"}]})
    )
    config = load_config("grpo-tiny", {"trainer.runs_root": str(tmp_path / "runs")})
    assert run_of_flow_run(config, "a") == run_of_flow_run(config, "b") == "run-1"
    assert run_of_flow_run(config, "c") is None
    own = load_config("grpo-tiny", {"trainer.default_local_dir": str(local)})
    assert run_of_flow_run(own, "c") == "run-3"


def test_a_broken_record_is_left_out_and_told(tmp_path, caplog):
    (run_folder(tmp_path, "run-1") / "run.json").write_text("{")
    run_folder(tmp_path, "run-2")
    assert [record["run_id"] for _, record in runs_in(tmp_path / "runs")] == ["run-2"]
    assert "run-1/run.json cannot be read" in caplog.text


def test_outcomes_are_those_of_the_newest_validation_and_a_failed_session_is_wrong(tmp_path):
    folder = tmp_path / "generations"
    folder.mkdir()
    (folder / "step-0000.jsonl").write_text(json.dumps({"index": 0, "acc": 0.0}) + "\n")
    rows = [
        {"index": 0, "acc": 1.0, "score": 0.3},
        {"index": 1, "score": 0.5},
        {"index": 2, "score": None, "error": "a session failed"},
    ]
    (folder / "step-0004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes = outcomes_of(tmp_path)
    assert outcomes == {"0": 1.0, "1": 0.5, "2": 0.0}
    assert remembered_outcomes(tmp_path, "h1", "base-models/tiny") is None
    remember_outcomes(tmp_path, "h1", "base-models/tiny", outcomes)
    assert remembered_outcomes(tmp_path, "h1", "base-models/tiny") == outcomes
    assert remembered_outcomes(tmp_path, "h2", "base-models/tiny") is None


def test_lineage_reads_from_data_to_promotion():
    text = lineage_markdown(
        {"promotion": "yes", "data_hash": "h", "extra": 1, "evaluation": ["a | b", "c"]}
    )
    rows = text.splitlines()[2:]
    assert rows == [
        "| data hash | h |",
        "| evaluation | a \\| b<br>c |",
        "| promotion | yes |",
        "| extra | 1 |",
    ]
