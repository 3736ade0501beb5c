"""The tiny project and the sites that the integration tests share; see tests/support/real_parts."""

import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from real_parts.processes import end_groups, free_port, start_ray_head
from real_parts.project import REFERENCE, Project
from real_parts.site import Site

from rlcore.data.prepare import prepare_tiny

OUTAGE_S = 100.0
"""Longer than the automation of dead hosts waits: a server that is back takes a run for silent."""
USER_CODE = Path(__file__).with_name("user_code")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what goes on beside a run that lasts before it, and its end behind the other tests."""

    def turn(item: pytest.Item) -> int:
        marked = {mark.name for mark in item.iter_markers()}
        return 0 if "first" in marked else 2 if "later" in marked else 1

    items.sort(key=turn)


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("p")
    prepare_tiny(root)
    (root / "tmp").mkdir()
    return Project(root)


@pytest.fixture(scope="session")
def find_port() -> Callable[[], int]:
    return free_port


@pytest.fixture(scope="session")
def ray_head():
    """Return `start_ray_head`; what it starts ends with the tests."""
    started: list[subprocess.Popen[bytes]] = []

    def start(home: Path, environment: dict[str, str], *, num_cpus: int) -> str:
        process, address = start_ray_head(home, environment, num_cpus=num_cpus)
        started.append(process)
        return address

    yield start
    end_groups(started)


@pytest.fixture(scope="session")
def make_site(project, tmp_path_factory):
    """Return a function that makes a site (see Site) with a server; all end with the tests."""
    sites: list[Site] = []

    def make(settings: str | None = None, **environment: str) -> Site:
        home = tmp_path_factory.mktemp("home")
        (home / "project").mkdir()
        sites.append(Site(project, home, settings, **environment))
        sites[-1].start_server()
        return sites[-1]

    yield make
    for site in sites:
        site.end()


@pytest.fixture(scope="session")
def served(make_site) -> dict[str, str]:
    """The environment of commands that use one server for all of them: none starts its own."""
    site = make_site()
    names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
    return {"PREFECT_HOME": str(site.home / "client"), **{name: site.env[name] for name in names}}


@pytest.fixture(scope="session")
def joined(project, served, ray_head, tmp_path_factory) -> Project:
    """The project, its trainings on one Ray cluster and one Prefect server that are there already.

    For runs that are not about their start or their end. A Ray cluster that a run starts itself
    also shares out the host's cores (`separate_async`): such a run takes `project`.
    """
    home = tmp_path_factory.mktemp("ray")
    address = ray_head(home, project.environment(), num_cpus=8)
    return Project(
        project.root, joins=(f"ray.address={address}",), variables={"HOME": str(home), **served}
    )


@pytest.fixture(scope="session")
def reference_run(joined) -> Path:
    """The folder of a whole run with the defaults, with which others are compared."""
    folder = joined.root / "reference"
    code, text = joined.run(
        "train", "grpo-tiny", *REFERENCE, f"trainer.runs_root={joined.root / 'references'}",
        f"trainer.default_local_dir={folder}",
    )  # fmt: skip
    assert code == 0, text[-6000:]
    return folder


STAND_INS = [
    {
        "name": "fake",
        "entrypoint": f"{Path(__file__).with_name('fakes.py')}:fake_{kind}",
        "parameters": {},
        "work_pool": {"name": "rollflow-aux"},
    }
    for kind in ("train", "evaluate")
]


@pytest.fixture(scope="session")
def operated_site(make_site):
    """A site with everything deployed and a worker for what needs no devices.

    Its `retrain` runs stand-ins for training and evaluation.
    """
    site = make_site()
    file = site.root / "prefect.yaml"
    content = yaml.safe_load(file.read_text())
    (retrain,) = (d for d in content["deployments"] if d["name"] == "on-new-data")
    retrain["parameters"] |= {
        "preset": "grpo-tiny",
        "train_with": "fake-train/fake",
        "evaluate_with": "fake-evaluate/fake",
        "root": "retrained",
        "store": "in_use",
    }
    content["deployments"] += STAND_INS
    file.write_text(yaml.safe_dump(content))
    site.deployed = site.rollflow("deploy")
    site.start_worker("rollflow-aux")
    return site


@pytest.fixture(scope="session")
def trainings_site(make_site):
    """A site with everything deployed and a worker for both pools: trainings are real."""
    site = make_site()
    site.rollflow("deploy")
    shutil.copytree(USER_CODE, site.root, dirs_exist_ok=True)
    site.workers = {pool: site.start_worker(pool) for pool in ("rollflow-train", "rollflow-aux")}
    return site


@pytest.fixture(scope="session")
def ray_address(trainings_site) -> str:
    """Start a Ray cluster with a token beside the workers; return its address."""
    return trainings_site.start_ray(num_cpus=4)


LONG_ROOT = "long"
LONG_STEPS = 120
LONG_CONFIG = {
    "actor_rollout_ref": {"rollout": {"checkpoint_engine": {"backend": "faulty"}}},
    "reward": {"custom_reward_function": {"path": "slow_reward.py"}},
    "trainer": {
        "runs_root": LONG_ROOT,
        "user_modules": ["faulty_engine.py"],
        "total_epochs": LONG_STEPS,
        "total_training_steps": LONG_STEPS,
        "save_freq": 2,
        "test_freq": 2,
        "max_actor_ckpt_to_keep": 1,
    },
}


@dataclass(frozen=True)
class LongRun:
    """A training that goes on for ten minutes beside the other tests, nearly idle.

    Its deployment runs one at a time; its second weight update has failed once.
    """

    site: Site
    flow_run_id: str
    root: str = LONG_ROOT


@pytest.fixture(scope="session")
def started_long_run(trainings_site) -> LongRun:
    """Ask for the long run; a worker starts it."""
    site = trainings_site
    site.limit(deployment="train/grpo-smollm2", to=1)
    flow_run_id = site.start_run(
        "train/grpo-smollm2", name="long", preset="grpo-tiny", config=LONG_CONFIG
    )
    return LongRun(site, flow_run_id)


@pytest.fixture(scope="session")
def long_run(started_long_run) -> LongRun:
    started_long_run.site.until_step(3, LONG_ROOT)
    return started_long_run


@dataclass(frozen=True)
class Outage:
    """The server of the long run is gone: how many steps were made, when it answered again."""

    steps_before: int
    back_at: "Future[float]"


@pytest.fixture(scope="session")
def outage_begun(long_run):
    """Kill the server of the long run, which comes back by itself after `OUTAGE_S`."""
    site, steps = long_run.site, long_run.site.steps_done(long_run.root)
    site.kill(site.server)

    def restart() -> float:
        time.sleep(OUTAGE_S)
        site.start_server()
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        yield Outage(steps, pool.submit(restart))


@pytest.fixture(scope="session")
def outage(outage_begun) -> float:
    """Wait for the end of the outage; return when the server was back."""
    return outage_begun.back_at.result(timeout=OUTAGE_S + 300)
