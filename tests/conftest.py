"""One Ray cluster and one Prefect server per pytest run; nothing here imports torch."""

import logging
from collections.abc import Iterator

import pytest
import ray
from prefect.testing.utilities import prefect_test_harness

RAY_NUM_CPUS = 16
"""Logical CPUs: TransferQueue asks for one per actor and would wait for ever on a small machine."""


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start the local Ray cluster that all tests of this run share."""
    ray.init(
        address="local",
        num_cpus=RAY_NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def prefect_session() -> Iterator[None]:
    """Start the temporary Prefect server that all tests of this run share."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
