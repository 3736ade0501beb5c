"""A run waits for records that are far behind, and only for those."""

import asyncio
from uuid import UUID

import pytest

from tasks.records import STRIDE, WINDOW, RecordWindow


class Server:
    """Records a task run after it was asked for it so many times."""

    def __init__(self, after):
        self.after = after
        self.asked = []

    async def look(self, task_run_id):
        self.asked.append(task_run_id.int)
        return self.asked.count(task_run_id.int) > self.after


def run(server, steps, per_step=10, **options):
    window = RecordWindow(server.look, poll_s=0.001, **options)
    number = 0
    for _ in range(steps):
        for _ in range(per_step):
            number += 1
            window.note(UUID(int=number))
        asyncio.run(window.catch_up())


def test_nothing_is_asked_of_a_short_run():
    server = Server(after=0)
    run(server, steps=WINDOW // 10 - 1)
    assert server.asked == []


def test_one_record_a_stride_is_asked_for_and_waited_for():
    server = Server(after=2)
    run(server, steps=(WINDOW + 2 * STRIDE) // 10)
    # Asked at 1,000, 1,200 and 1,400 ended ones for the end of the oldest stride, each three times.
    wanted = [STRIDE, 2 * STRIDE, 3 * STRIDE]
    assert server.asked == [number for number in wanted for _ in range(3)]


def test_a_record_that_never_comes_is_given_up_and_the_window_begins_anew(caplog):
    server = Server(after=10**9)
    run(server, steps=WINDOW // 10 + 3, patience_s=0.01)
    assert set(server.asked) == {STRIDE}
    assert "not recorded within 0.01 s" in caplog.text


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ConnectionError("no server"), "ConnectionError: no server"),
        (None, "not recorded within 0.05 s"),
    ],
)
def test_a_server_that_is_away_or_hangs_ends_no_run(caplog, fault, said):
    asked = []

    class Away:
        async def look(self, task_run_id):
            asked.append(task_run_id.int)
            if fault is not None:
                raise fault
            await asyncio.sleep(60)

    run(Away(), steps=WINDOW // 10 + 3, patience_s=0.05)
    assert asked == [STRIDE]
    assert said in caplog.text
