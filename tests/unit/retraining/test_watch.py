import os
import time

from rlcore.retraining.watch import look


def touched(path, age_s=100):
    os.utime(path, (time.time() - age_s,) * 2)


def test_contents_count_not_dates(tmp_path):
    state, file = tmp_path / "state" / "watch.json", tmp_path / "a.parquet"
    patterns = [str(tmp_path / "*.parquet")]
    assert look(patterns, state, settle_s=30).verdict == "Unchanged"  # there is no file
    file.write_bytes(b"one")
    assert look(patterns, state, settle_s=30).verdict == "Unsettled"
    touched(file)
    seen = look(patterns, state, settle_s=30)
    assert (seen.verdict, seen.files) == ("New", [str(file)])
    assert look(patterns, state, settle_s=30).verdict == "New"  # nobody was told yet
    seen.remember(state)
    touched(file, age_s=50)
    assert look(patterns, state, settle_s=30).verdict == "Unchanged"
    file.write_bytes(b"two")
    touched(file)
    assert look(patterns, state, settle_s=30).verdict == "New"


def test_another_file_is_new(tmp_path):
    state = tmp_path / "watch.json"
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(b"rows")
        touched(tmp_path / f"{name}.parquet")
    look([str(tmp_path / "a.parquet")], state, settle_s=1).remember(state)
    both = look([str(tmp_path / "?.parquet")], state, settle_s=1)
    assert both.is_new
    assert len(both.files) == 2
