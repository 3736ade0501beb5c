"""The file of a run's weights: held by its owner, removed when the owner is dead."""

import os
import subprocess
import sys

import pytest

from rlcore.checkpoint_engine.segment_file import hold_segment, remove_leftovers, segment_path
from rlcore.errors import DeadlineExceededError

HOLDER = (
    "import sys, time; from pathlib import Path\n"
    "from rlcore.checkpoint_engine.segment_file import hold_segment\n"
    "hold_segment(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)\n"
)


def test_a_leftover_is_removed_and_a_held_one_is_not(tmp_path):
    path = segment_path(tmp_path, "run-1")
    (tmp_path / "something-else.weights").write_bytes(b"not ours")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        path.write_bytes(b"weights")
        assert remove_leftovers(tmp_path) == []
        owner.kill()
    assert remove_leftovers(tmp_path) == [path]
    assert [left.name for left in tmp_path.iterdir()] == ["something-else.weights"]
    os.close(hold_segment(path))
    assert path.is_file()


def test_one_owner_at_a_time(tmp_path):
    path = segment_path(tmp_path, "run-1")
    descriptor = hold_segment(path)
    with pytest.raises(DeadlineExceededError, match=r"run-1\.weights, which the trainer"):
        hold_segment(path, wait_s=0.1)
    os.close(descriptor)
    os.close(hold_segment(path))
