"""An attempt without Ray: its cluster runs nothing, or is a fake."""

import asyncio
from types import SimpleNamespace

import pytest

ROWS = 64


class Pool:
    """Runs nothing."""

    pool_id = "none"

    def set_stray_sink(self, sink):
        self.sink = sink


@pytest.fixture
def make_run(tmp_path):
    """Make an attempt of a tiny run, with some of its `trainer` keys changed."""
    # Imported here: the tests of the lowest Prefect run without torch.
    from rlcore.testing.tiny_run import tiny_config
    from rlcore.trainer.run_folder import RunFolder
    from tasks.active_run import ActiveRun

    made = []

    def make(cluster=None, **trainer):
        overrides = {f"trainer.{name}": value for name, value in trainer.items()}
        config = tiny_config(tmp_path, {"trainer.logger": ["file"], **overrides})
        folder = RunFolder.create(tmp_path / "runs" / "x", run_id="x", request={})
        cluster = cluster or SimpleNamespace(ledger=None, replicas={})
        cluster.executors, cluster.training, cluster.checkpoint_manager = Pool(), None, None
        cluster.reward_model = None
        run = ActiveRun(config=config, folder=folder, attempt=1, cluster=cluster, rows=ROWS)
        made.append(run)
        return run

    yield make
    for run in made:
        asyncio.run(run.reporter.end(None))
