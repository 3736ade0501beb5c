import pytest

from rlcore.buffer.journal import CHUNK_BYTES, Journal, read_journal
from rlcore.errors import CheckpointError, DataError


def test_events_come_back_as_they_were_answered(tmp_path):
    journal = Journal(tmp_path / "a" / "ledger.jsonl")
    answered = [journal.append({"op": "x", "pair": (1, 2), "text": "ä\n"}), journal.append({})]
    # Flushed already: another process reads it now.
    assert list(read_journal(journal.path)) == answered == [
        {"op": "x", "pair": [1, 2], "text": "ä\n"}, {}
    ]  # fmt: skip


def test_what_json_cannot_carry_is_refused_and_not_written(tmp_path):
    journal = Journal(tmp_path / "ledger.jsonl")
    with pytest.raises(DataError, match="plain values only"):
        journal.append({"value": {1, 2}})
    assert list(read_journal(journal.path)) == []


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_a_torn_last_line_is_dropped(tmp_path, size):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n"' + b"x" * size)
    assert list(read_journal(path)) == [{"n": 1}, {"n": 2}]
    journal = Journal(path)
    journal.append({"n": 3})
    assert list(read_journal(path)) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":\n{"n":3}\n')
    with pytest.raises(CheckpointError, match="line 2 is not JSON"):
        list(read_journal(path))
    with pytest.raises(CheckpointError, match="no ledger journal"):
        list(read_journal(tmp_path / "none"))


def test_one_writer_at_a_time(tmp_path):
    journal = Journal(tmp_path / "ledger.jsonl")
    with pytest.raises(CheckpointError, match="written by another ledger"):
        Journal(journal.path)
    journal.close()
    Journal(journal.path).close()
