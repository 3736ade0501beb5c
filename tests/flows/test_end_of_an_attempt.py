"""What becomes of the last snapshot, by how an attempt ended."""

import asyncio

import pytest
from prefect.exceptions import Pause, TerminationSignal


def errors():
    from rlcore.errors import ActorUnavailableError, DataError

    return {
        "finished": None,
        "crashed": ActorUnavailableError("the queue host is gone"),
        "failed": DataError("row 3"),
        "cancelled": asyncio.CancelledError(),
        "terminated": TerminationSignal(signal=15),
        "suspended": Pause(),
    }


@pytest.fixture
def attempt(tmp_path):
    """A run folder with a snapshot of step 3, and its store."""
    from rlcore.trainer.run_folder import RunFolder
    from rlcore.trainer.snapshots import SnapshotStore

    folder = RunFolder.create(tmp_path / "r", run_id="r", request={})
    (folder.path / "config.json").write_text("{}")
    folder.begin_attempt(max_attempts=9)
    store = SnapshotStore(folder)

    def write_actor(path):
        path.mkdir()
        (path / "weights").touch()

    store.save(
        global_step=3,
        attempt=1,
        trainer={"state": {}, "ledger": {}},
        write_actor=write_actor,
    )
    yield folder, store
    store.remove()


@pytest.mark.parametrize(
    ("outcome", "in_memory", "on_disk"),
    [
        ("finished", [], []),
        ("crashed", [3], []),  # another attempt goes on from it soon
        ("failed", [], [3]),  # a person does, later
        ("cancelled", [], [3]),
        ("terminated", [], [3]),  # the host may shut down
        ("suspended", [], []),  # a checkpoint was made before
    ],
)
def test_the_last_step_is_kept_where_it_will_be_looked_for(attempt, outcome, in_memory, on_disk):
    from rlcore.trainer.checkpoint import CheckpointStore
    from tasks.lifecycle import _recorded

    folder, store = attempt

    async def end():
        async with _recorded(folder, 1):
            if (error := errors()[outcome]) is not None:
                raise error

    if outcome == "finished":
        asyncio.run(end())
    else:
        with pytest.raises(type(errors()[outcome])):
            asyncio.run(end())
    assert folder.record()["attempts"][0]["outcome"] == outcome
    assert store.steps() == in_memory
    assert CheckpointStore(folder).steps() == on_disk
    assert store.root.exists() == bool(in_memory)
