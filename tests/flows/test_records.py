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
    assert "has not recorded task run" in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_is_away_or_hangs_ends_no_run(caplog, hangs):
    asked = []

    class Away:
        async def look(self, task_run_id):
            asked.append(task_run_id.int)
            if hangs:
                await asyncio.sleep(60)
            raise ConnectionError("no server")

    run(Away(), steps=WINDOW // 10 + 3, patience_s=0.05)
    assert set(asked) == {STRIDE}
    assert (len(asked) == 1) == hangs
    assert "within 0.05 s" in caplog.text
    assert ("ConnectionError: no server" in caplog.text) == (not hangs)


def test_a_server_that_is_away_for_a_moment_is_asked_again(caplog):
    answers = [ConnectionError("restarting"), ConnectionError("restarting"), False, True]
    asked = []

    class Back:
        async def look(self, task_run_id):
            asked.append(task_run_id.int)
            answer = answers[len(asked) - 1]
            if isinstance(answer, Exception):
                raise answer
            return answer

    run(Back(), steps=WINDOW // 10)
    assert asked == [STRIDE] * 4
    assert caplog.text == ""
