"""Events, schedules, automations, approval and promotion on a real server with a worker; no Ray."""

import json
import time
from datetime import datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed, Failed, Running
from real_parts.beside import begin

from tasks.automations import apply_automations, read_automations

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.first,
]


@pytest.fixture(scope="module")
def site(request, operated_site):
    begin(request, "started_long_run")  # at another site, which makes its first steps meanwhile
    site = operated_site
    for name in ("a", "b", "c"):
        folder = site.root / "candidates" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"name": name}))
    return site


def promoted(site):
    return json.loads((site.root / "promoted" / "current" / "config.json").read_text())["name"]


def candidate_is_ready(site, name):
    site.emit(
        "rollflow.candidate.ready", f"rollflow.candidate.run-{name}",
        {"candidate": f"run-{name}", "model": f"candidates/{name}", "root": "retraining",
         "store": "promoted"},
    )  # fmt: skip


def test_one_command_deploys_pools_deployments_and_automations(site):
    pools = site.query("select name, concurrency_limit from work_pool order by name")
    assert pools == [("rollflow-aux", None), ("rollflow-train", 1)]
    deployed = site.query(
        "select f.name || '/' || d.name from deployment d join flow f on d.flow_id = f.id"
    )
    names = {name for (name,) in deployed}
    assert {"train/nightly", "retrain/on-new-data", "promote/on-candidate"} <= names
    first = site.query("select id, name from automation order by name")
    assert "created: rollflow: dead host" in site.deployed
    files = read_automations(site.root / "deployments" / "automations")
    lines = site.ask(lambda client: apply_automations(client, files))
    assert all(line.startswith("replaced: rollflow: ") for line in lines)
    assert site.query("select id, name from automation order by name") == first


def test_the_nightly_schedule_comes_at_one_in_the_morning(site):
    def scheduled():
        return site.query(
            "select r.expected_start_time from flow_run r join deployment d on "
            "r.deployment_id = d.id where d.name = 'nightly' order by r.expected_start_time"
        )

    times = [time for (time,) in site.until("nothing is scheduled", scheduled)]
    assert all(" 01:00:00" in str(time) or "T01:00:00" in str(time) for time in times)
    assert len(times) == len(set(times))


def test_an_interval_schedule_fires_again_and_again(site):
    """That of the watcher, every ten seconds instead of every five minutes."""
    reschedule(site, timedelta(seconds=10))

    def fired():
        found = site.query(
            "select r.expected_start_time from flow_run r join flow f on r.flow_id = f.id "
            "where f.name = 'watch-data' and r.auto_scheduled and r.state_name = 'Unchanged' "
            "order by r.expected_start_time"
        )
        times = [datetime.fromisoformat(str(time)) for (time,) in found]
        return [b - a for a, b in pairwise(times) if b - a == timedelta(seconds=10)]

    site.until(f"it does not fire: {site.flow_runs('watch-data')[:5]}", fired)
    reschedule(site, timedelta(days=1))


def reschedule(site, interval):
    async def put(client):
        deployment = await client.read_deployment_by_name("watch-data/new-data")
        (had,) = deployment.schedules
        await client.update_deployment_schedule(
            deployment.id, had.id, schedule=IntervalSchedule(interval=interval)
        )

    site.ask(put)


def test_wrong_parameters_are_refused_before_a_run_exists(site):
    before = len(site.flow_runs("train"))
    with pytest.raises(PrefectHTTPStatusError) as refused:
        site.start_run("train/nightly", config={"trainer": {"save_frek": 1}})
    assert "save_frek" in refused.value.response.text
    assert len(site.flow_runs("train")) == before


def test_an_event_of_the_command_line_asks_a_person_and_approval_promotes(site):
    candidate_is_ready(site, "a")
    run = site.until_state("promote", "Paused")
    assert run["name"] == "promote-run-a"
    assert run["parameters"]["model"] == "candidates/a"
    assert run["parameters"]["approval"] is True
    assert not (site.root / "promoted").exists()
    site.resume(run["id"], decision="approve", reason="it adds up")
    site.until_state("promote", "Completed")
    assert promoted(site) == "a"
    pointer = json.loads((site.root / "promoted" / "current.json").read_text())
    assert pointer["reason"] == "approved: it adds up"
    lineage = json.loads((site.root / "retraining" / "lineage" / "run-a.json").read_text())
    assert lineage["promotion"] == "promoted: approved: it adds up"


def test_a_rejection_promotes_nothing_and_keeps_the_reason(site):
    candidate_is_ready(site, "b")
    run = site.until_state("promote", "Paused")
    site.resume(run["id"], decision="reject", reason="too long winded")
    site.until_state("promote", "Rejected")
    assert promoted(site) == "a"
    lineage = json.loads((site.root / "retraining" / "lineage" / "run-b.json").read_text())
    assert lineage["promotion"] == "rejected: too long winded"


def test_promotion_without_approval_and_rollback(site):
    site.start_run("promote/on-candidate", candidate="run-c", model="candidates/c", approval=False)
    site.until_state("promote", "Completed")
    assert promoted(site) == "c"
    assert "run-a is current in promoted again" in site.rollflow("rollback")
    assert promoted(site) == "a"


def test_a_crashed_attempt_is_continued_as_a_new_run_that_resumes(site):
    """The run folder says what the attempt was; no training worker is there to take the next."""
    flow_run_id = site.start_run(
        "train/grpo-smollm2", preset="grpo-tiny", overrides={"trainer.max_attempts": 2}
    )
    crash(site, flow_run_id, attempts=1)

    def continued():
        runs = site.flow_runs("train")
        return [run for run in runs if run["parameters"].get("resume") == f"run-{flow_run_id}"]

    (second,) = site.until("nothing continues the crashed attempt", continued)
    assert second["name"] == f"run-{flow_run_id}-attempt-2"
    assert second["parameters"]["overrides"] == {"trainer.max_attempts": 2}
    assert second["parameters"]["config"]["deadlines"]["device_lock"] == 3600
    # The second crashes, too: the run has used its attempts.
    crash(site, second["id"], attempts=2, of=flow_run_id)
    site.until_state("continue-run", "Failed")
    assert len(continued()) == 1


def crash(site, flow_run_id, attempts, of=None):
    folder = site.root / "runs" / f"run-{of or flow_run_id}"
    folder.mkdir(parents=True, exist_ok=True)
    made = [{"attempt": i + 1, "began": time.time(), "flow_run_id": str(uuid4())}
            for i in range(attempts)]  # fmt: skip
    made[-1]["flow_run_id"] = flow_run_id
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name, "attempts": made}))
    site.set_state(flow_run_id, Running(), Crashed(message="the host died"))


def test_a_failure_of_the_user_is_told_and_not_continued(site):
    continued = len(site.flow_runs("continue-run"))
    flow_run_id = site.start_run("train/nightly", name="nightly-by-hand")
    site.set_state(flow_run_id, Failed(message="row 7 has no prompt"))
    told = site.until_state("notify", "Completed")
    assert told["parameters"]["subject"] == "train: nightly-by-hand failed"
    assert told["parameters"]["body"] == "row 7 has no prompt"
    assert len(site.flow_runs("continue-run")) == continued
