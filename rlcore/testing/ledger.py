"""Builders for tests of what works with the ledger: prompts, sessions, a clock."""

import zlib
from typing import Any

from rlcore.types import PromptSpec, SessionRecord


class FakeClock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


def prompt_spec(uid: str, **changes: Any) -> PromptSpec:
    """Return a training prompt of run `run-1` with two sessions, changed by `changes`."""
    values: dict[str, Any] = {
        "uid": uid,
        "partition_id": "run-1/train",
        "global_step": 1,
        "epoch": 0,
        "index": zlib.crc32(uid.encode()),
        "raw_prompt": [{"role": "user", "content": f"{uid}?"}],
        "num_sessions": 2,
        "fields": {"data_source": "test"},
    }
    return PromptSpec(**{**values, **changes})


def good_session(uid: str, session_id: int, **changes: Any) -> SessionRecord:
    """Return a session of one row that was rewarded with 1, changed by `changes`."""
    values: dict[str, Any] = {
        "session_id": session_id,
        "keys": [f"{uid}_{session_id}_0"],
        "tags": [{"prompt_len": 3, "response_len": 4}],
        "reward": 1.0,
        "reward_extra": {"acc": 1.0},
    }
    return SessionRecord(**{**values, **changes})


def failed_session(session_id: int, **changes: Any) -> SessionRecord:
    """Return a session that ended with an error, changed by `changes`."""
    values: dict[str, Any] = {
        "session_id": session_id,
        "keys": [],
        "tags": [],
        "error_type": "RewardError",
        "error_message": "row 7: ValueError: no",
    }
    return SessionRecord(**{**values, **changes})


def sessions_of(uid: str, *, num: int, num_failed: int = 0) -> list[SessionRecord]:
    """Return the sessions of a prompt, the first `num_failed` of them failed."""
    return [failed_session(i) if i < num_failed else good_session(uid, i) for i in range(num)]
