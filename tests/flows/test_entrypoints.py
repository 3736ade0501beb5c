"""prefect.yaml and the automations: every entrypoint and preset loads, every reference resolves."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule

from rlcore.config import load_config
from tasks.automations import read_automations
from tasks.deployments import load_flow, read_deployments

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOYMENTS = read_deployments(REPOSITORY / "prefect.yaml")
AUTOMATIONS = read_automations(REPOSITORY / "deployments" / "automations")
POOLS = {
    pool["name"]: pool["concurrency_limit"]
    for pool in yaml.safe_load((REPOSITORY / "deployments" / "work_pools.yaml").read_text())
}
NAMES = [f"{load_flow(entry).name}/{entry['name']}" for entry in DEPLOYMENTS]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_a_deployment_loads_and_takes_its_parameters(deployment, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    flow = load_flow(deployment)  # a placeholder would hide an import error
    assert deployment["entrypoint"].split(".")[-1] == flow.fn.__name__
    parameters = deployment["parameters"]
    assert parameters.keys() <= flow.parameters.properties.keys()
    missing = set(flow.parameters.required) - parameters.keys()
    if not missing:
        flow.validate_parameters(parameters)
    # What starts a deployment with a missing parameter has to give it.
    assert missing <= started_with(f"{flow.name}/{deployment['name']}") | given_by(deployment)
    if "preset" in parameters:
        load_config(parameters["preset"], parameters["overrides"], parameters.get("config"))


def test_no_file_of_flows_hides_an_installed_module():
    # A path entrypoint (`flows/train.py:train`) puts flows/ in front of sys.path.
    found = (REPOSITORY / "flows").glob("*")
    names = {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {"train", "command"} <= names
    assert names.isdisjoint(sys.stdlib_module_names | packages_distributions().keys())


def started_with(name):
    actions = [action for file in AUTOMATIONS for action in file.content["actions"]]
    found = [set(a["parameters"]) for a in actions if a.get("deployment") == name]
    return set().union(*found)


def given_by(deployment):
    triggers = deployment.get("triggers") or []
    return set().union(*(set(trigger.get("parameters") or {}) for trigger in triggers))


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_every_deployment_has_a_pool_that_is_made_and_leaves_overrides_to_the_user(deployment):
    pool = deployment["work_pool"]["name"]
    assert pool in POOLS
    assert "concurrency_limit" not in deployment  # a paused run would lose its slot and crash
    assert not deployment["parameters"].get("overrides")
    for schedule in deployment.get("schedules") or []:
        if "cron" in schedule:
            CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        else:
            assert schedule.keys() == {"interval"}
            assert schedule["interval"] > 0


def test_names_are_unique_and_only_training_has_one_place():
    assert len(set(NAMES)) == len(NAMES)
    assert POOLS == {"rollflow-train": 1, "rollflow-aux": None}
    by_name = dict(zip(NAMES, DEPLOYMENTS, strict=True))
    needs_devices = {n for n, d in by_name.items() if d["work_pool"]["name"] == "rollflow-train"}
    assert {name.split("/")[0] for name in needs_devices} == {"train", "evaluate-policy"}


@pytest.mark.parametrize("file", AUTOMATIONS, ids=lambda file: file.path.stem)
def test_an_automation_is_one_of_prefects_and_starts_a_deployment_of_ours(file):
    assert set(file.deployments) <= set(NAMES)
    ids = dict.fromkeys(NAMES, "00000000-0000-0000-0000-000000000001")
    automation = file.resolved(ids)
    assert automation.name == file.name
    assert len(automation.actions) == len(file.content["actions"])


def test_heartbeats_come_often_enough_for_the_automation_that_waits_for_them():
    (dead,) = (file for file in AUTOMATIONS if file.path.stem == "dead-host")
    within = dead.content["trigger"]["within"]
    for deployment in DEPLOYMENTS:
        env = deployment["work_pool"]["job_variables"]["env"]
        assert within > 3 * int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("train", "train"),
        ("evaluate_policy", "evaluate_policy"),
        ("train_step", "train_step"),
        ("train_step", "start_run"),
        ("train_step", "save_run"),
        ("train_step", "end_run"),
        ("rollout_producer", "rollout_producer"),
        ("continue_run", "continue_run"),
        ("check_heartbeat", "check_heartbeat"),
        ("prepare_data", "prepare_data"),
    ],
)
def test_no_flow_stores_results_or_retries(module, name):
    from importlib import import_module

    flow = getattr(import_module(f"flows.{module}"), name)
    # Prefect matches subflows by call index: a retried parent with stored results skips steps.
    assert flow.persist_result is False
    assert flow.retries == 0  # given, not by default: a server may set another


def test_every_page_of_a_run_is_one_that_a_second_start_keeps():
    source = (REPOSITORY / "flows" / "train.py").read_text()
    (kept,) = re.findall(r"keep_earlier_pages\(\[(.*)\]\)", source)
    called = set(re.findall(r"await (\w+)\.with_options\(task_runner", source))
    called |= set(re.findall(r"page = (\w+)\.with_options", source)) | {"rollout_producer"}
    assert called == set(kept.split(", "))


def test_no_phase_stores_results_and_every_phase_retries_faults_only():
    from prefect.cache_policies import NO_CACHE

    from tasks.data import prepare_task
    from tasks.phases import PHASE_TASKS
    from tasks.retry import retry_transient
    from tasks.weights import manager_call

    for task in [*PHASE_TASKS.values(), manager_call]:
        assert task.persist_result is False
        assert task.cache_policy is NO_CACHE or task.cache_policy == NO_CACHE
        # A call on the manager sets more, see test_weights.py.
        assert task.retries == 3
        assert task.retry_condition_fn is retry_transient
    assert prepare_task.persist_result is False
    assert (prepare_task.cache_policy, prepare_task.retries) == (NO_CACHE, 0)
