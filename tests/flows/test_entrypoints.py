"""Every entrypoint of prefect.yaml loads, and its parameters are ones that the flow takes."""

from pathlib import Path

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint

from rlcore.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOYMENTS = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_an_entrypoint_loads_as_the_flow_it_names(deployment, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    # A placeholder would hide an import error.
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    assert deployment["entrypoint"].split(".")[-1] == flow.fn.__name__
    flow.validate_parameters(deployment["parameters"])
    load_config(deployment["parameters"]["preset"], deployment["parameters"]["overrides"])


FLOWS = ["train", "evaluate_policy", "train_step", "rollout_producer", "prepare_data"]


@pytest.mark.parametrize("name", FLOWS)
def test_no_flow_stores_results_or_retries(name):
    from importlib import import_module

    flow = getattr(import_module(f"flows.{name}"), name)
    # Prefect matches subflows by call index: a retried parent with stored results skips steps.
    assert flow.persist_result is False
    assert flow.retries == 0  # given, not by default: a server may set another


def test_no_phase_stores_results_and_every_phase_retries_faults_only():
    from prefect.cache_policies import NO_CACHE

    from tasks.data import prepare_task
    from tasks.phases import PHASE_TASKS
    from tasks.retry import retry_transient
    from tasks.weights import manager_call

    for task in [*PHASE_TASKS.values(), manager_call]:
        assert task.persist_result is False
        assert task.cache_policy is NO_CACHE or task.cache_policy == NO_CACHE
        assert task.retries == 3
        assert task.retry_condition_fn is retry_transient
    assert prepare_task.persist_result is False
    assert (prepare_task.cache_policy, prepare_task.retries) == (NO_CACHE, 0)
