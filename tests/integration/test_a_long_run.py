"""A training of a deployment that lasts: its server dies, others wait for it, a person cancels it.

It goes on beside the other tests; what is marked `later` follows them.
"""

import time

import psutil
import pytest
from prefect.states import Cancelling

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.timeout(900),
]

LEASE_S = 360
"""A lease of a deployment's slot lasts 300 s: a lost one would have ended the run by then."""
CANCEL_S = 25
NOTICE_S = 30
"""The worker lost sight of the run with the server: the run looks after each step of 13 seconds and
gives a worker 12. (A worker that sees it: test_deployment.py.)"""
SECOND = {
    "deadlines": {"device_lock": 600},
    "trainer": {
        "runs_root": "second",
        "max_wall_s": 1,
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": False,
        "steps_per_page": "auto",
    },
}


def pages(site):
    """Return name -> state of the step pages; every one is there once."""
    found = site.query("select name, state_name from flow_run where name like 'step-%'")
    assert len(found) == len(dict(found))
    return dict(found)


def test_a_server_that_is_killed_and_comes_back_delays_pages_only(long_run, outage_begun, outage):
    site, made = long_run.site, long_run.site.steps_done(long_run.root)
    assert made >= outage_begun.steps_before + 2  # it trained on meanwhile
    site.until_step(made + 2, long_run.root, timeout_s=240)
    ends = [(a.get("outcome"), a.get("message")) for a in site.attempts(long_run.root)]
    assert ends == [(None, None)], site.query("select type, name, message from flow_run_state")
    shown = pages(site)
    assert [shown[f"step-{step:04d}"] for step in range(1, made + 2)] == ["Completed"] * (made + 1)


@pytest.mark.later
def test_six_minutes_later_it_still_runs_in_its_slot(long_run, outage):
    """Nor was it taken for dead, though nobody heard its heart beat for so long."""
    site = long_run.site
    time.sleep(max(0.0, outage + LEASE_S - time.monotonic()))
    site.until_step(site.steps_done(long_run.root) + 1, long_run.root, timeout_s=120)
    states = site.query(
        "select distinct name from flow_run_state where flow_run_id = ?", long_run.flow_run_id
    )
    assert ("Crashed",) not in states
    assert site.state_of(long_run.flow_run_id) == "Running"
    assert len(site.attempts(long_run.root)) == 1
    ((used, limit),) = site.query(
        "select active_slots, \"limit\" from concurrency_limit_v2 where name like 'deployment:%'"
    )
    assert (used, limit) == (1, 1)
    assert "lease renewal failed" not in site.logs_of(long_run.flow_run_id)


@pytest.mark.later
def test_a_second_training_waits_for_the_devices_of_one_that_is_cancelled(long_run):
    site = long_run.site
    site.limit(pool="rollflow-train", to=2)
    second = site.start_run("train/nightly", name="second", preset="grpo-tiny", config=SECOND)
    holder = site.run_folder(long_run.root).name
    site.until(
        "the second training does not say who holds the devices",
        lambda: f"held by run {holder}" in site.logs_of(second),
    )
    assert site.run_folder("second") is None
    site.limit(pool="rollflow-train", to=1)

    # Responses are being scored, which takes nearly all of a step: cancelled during rollout.
    driver = psutil.Process(site.attempts(long_run.root)[0]["pid"])
    family = [driver, *driver.children(recursive=True)]
    assert len(family) > 5
    began = time.monotonic()
    site.set_state(long_run.flow_run_id, Cancelling())
    _, alive = psutil.wait_procs(family, timeout=NOTICE_S + CANCEL_S)
    assert [process.cmdline()[:3] for process in alive if process.is_running()] == []
    assert time.monotonic() - began < NOTICE_S + CANCEL_S
    assert [a["outcome"] for a in site.attempts(long_run.root)] == ["cancelled"]
    site.until("it is not Cancelled", lambda: site.state_of(long_run.flow_run_id) == "Cancelled")

    # The second has the devices now. Its time is over in its first step, which is its last, with
    # all that belongs to an end.
    site.until_attempt(1, "finished", "second")
    assert site.steps_done("second") == 1
    folder = site.run_folder("second")
    assert (folder / "global_step_1" / "trainer.json").is_file()
    assert (folder / "model" / "model.safetensors").is_file()
    assert (folder / "generations" / "step-0001.jsonl").is_file()
    site.until("it is not Completed", lambda: site.state_of(second) == "Completed")


@pytest.mark.later
def test_no_secret_is_in_a_log_or_a_process_list(long_run, ray_address):
    site = long_run.site
    token = (site.home / ".ray" / "auth_token").read_text().strip()
    logs = "".join(path.read_text() for path in site.home.glob("*.log"))
    logs += site.logs_of(long_run.flow_run_id)
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    for secret in (site.password, token):
        assert secret not in logs
        assert not any(secret in argument for command in commands for argument in command)
