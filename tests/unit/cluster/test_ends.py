"""How everything ends within its time, whatever hangs; no Ray."""

import asyncio
import logging
import threading
import time

import pytest

from rlcore.cluster.ends import Ends
from rlcore.daemon_thread import in_daemon_thread
from rlcore.errors import ActorUnavailableError


@pytest.fixture
def never():
    """An event that is set when the test is over: what hangs on it does not outlive the test."""
    event = threading.Event()
    yield event
    event.set()


def seconds(coroutine):
    began = time.monotonic()
    asyncio.run(coroutine)
    return time.monotonic() - began


def test_ends_run_side_by_side_and_the_last_one_after_them():
    done = []
    ends = Ends(budget_s=20, last_s=1)
    ends.set_last("Ray", lambda: done.append("Ray"))
    together = threading.Barrier(3)
    for name in ("trainer", "replica-0", "ledger"):
        # Each waits for the two others: one after the other they would never end.
        ends.add(name, lambda name: (together.wait(10), done.append(name)), name)
    asyncio.run(ends.run())
    assert sorted(done[:3]) == ["ledger", "replica-0", "trainer"]
    assert done[3:] == ["Ray"]
    asyncio.run(ends.run())
    assert len(done) == 4


def test_what_hangs_costs_the_budget_and_not_more(never, caplog):
    done = []
    ends = Ends(budget_s=0.6, last_s=0.2)
    ends.add("trainer", never.wait)
    ends.add("ledger", lambda: done.append("ledger"))
    ends.set_last("Ray", lambda: done.append("Ray"))
    with caplog.at_level(logging.WARNING):
        assert 0.35 < seconds(ends.run()) < 0.6
    assert done == ["ledger", "Ray"]
    assert [m for m in caplog.messages if "the end of the trainer takes longer than" in m]
    last_hangs = Ends(budget_s=0.3, last_s=0.2)
    last_hangs.set_last("Ray", never.wait)
    assert 0.25 < seconds(last_hangs.run()) < 0.6


def test_the_budget_may_have_begun_before(never):
    ends = Ends(budget_s=0.5, last_s=0.0)
    ends.add("trainer", never.wait)
    ends.begin()
    time.sleep(0.4)
    ends.begin()  # has no effect
    assert seconds(ends.run()) < 0.3


def test_what_is_still_being_started_is_waited_for_and_ends_as_soon_as_it_is_made():
    done = []
    ends = Ends(budget_s=20, last_s=1)
    ends.set_last("Ray", lambda: done.append("Ray"))
    ending = threading.Event()
    ends.add("ledger", ending.set)

    def start():
        assert ending.wait(10)
        ends.add("trainer", lambda: done.append("trainer"))
        done.append("goes on")

    async def main():
        job = asyncio.wrap_future(in_daemon_thread(start, name="start"))
        await ends.run({job: "the start of the trainer"})
        return job

    job = asyncio.run(main())
    assert done == ["trainer", "Ray"]
    with pytest.raises(RuntimeError, match="trainer was made when everything ended"):
        job.result()


def test_after_ray_has_ended_nothing_is_asked_of_it():
    ends = Ends(budget_s=1, last_s=0.5)
    asyncio.run(ends.run())
    called = []
    with pytest.raises(RuntimeError, match="trainer was made"):
        ends.add("trainer", lambda: called.append(True))
    assert called == []


def test_a_dead_process_is_what_was_wanted_other_errors_are_raised_after_all_ends(caplog):
    done = []

    def raise_(error):
        raise error

    ends = Ends(budget_s=20, last_s=1)
    ends.add("ledger", raise_, ActorUnavailableError("its process is gone"))
    ends.add("trainer", raise_, OSError("the segment cannot be removed"))
    ends.set_last("Ray", lambda: done.append("Ray"))
    with pytest.raises(OSError, match="the segment cannot be removed"):
        asyncio.run(ends.run())
    assert done == ["Ray"]
    assert "ending the ledger: its process is gone" in caplog.messages
