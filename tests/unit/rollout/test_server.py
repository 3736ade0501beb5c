"""States, gate, control lane and weight updates of a replica, with a scripted engine."""

import asyncio
import threading
import time

import pytest

from rlcore.errors import (
    ActorUnavailableError,
    ConfigError,
    DeadlineExceededError,
    FencedError,
    ReplicaBusyError,
    RolloutError,
    TransientError,
    WeightSyncError,
)
from rlcore.rollout.server import LLMServer, ServerDeadlines
from rlcore.testing.scripted_engine import ScriptedEngine
from rlcore.types import CallKey, WeightMeta

LONG = 10**9
"""Tokens of a request that never ends by itself."""


def _key(step=1, phase="p", try_number=1, attempt=1, run_id="r"):
    return CallKey(
        run_id=run_id, attempt=attempt, global_step=step, phase=phase, try_number=try_number
    )


def _meta(version, checksum="c"):
    return WeightMeta(version=version, path="", num_bytes=8, checksum=checksum, tensors=[])


def _params(max_tokens=4, seed=100, **more):
    return {"max_tokens": max_tokens, "seed": seed, **more}


def _serve(scenario, engine=None, **options):
    """Run `scenario(server, engine)` with a deadline and close the server."""
    engine = engine or ScriptedEngine()

    async def main():
        server = LLMServer(lambda: engine, run_id="r", **options)
        try:
            async with asyncio.timeout(30):
                await server.wait_ready(10)
                await scenario(server, engine)
        finally:
            await server.close()

    asyncio.run(main())


async def _started(server, engine, *names, max_tokens=LONG):
    """Start requests that do not end and wait until each has a token."""
    tasks = [asyncio.create_task(server.generate(name, [1], _params(max_tokens))) for name in names]
    for name in names:
        while not ((part := await server.partial(name)) and part.token_ids):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
    return tasks


async def _until_parked(server, count=1):
    while (await server.health())["parked"] < count:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


def test_generates_for_many_and_counts():
    async def scenario(server, engine):
        outputs = await asyncio.gather(
            *(server.generate(f"q{i}", [1, 2], _params(3, seed=10 * i)) for i in range(50))
        )
        assert [o.token_ids for o in outputs] == [[10 * i + k for k in range(3)] for i in range(50)]
        health = await server.health()
        assert health["state"] == "ready"
        assert (health["num_tokens"], health["in_flight"], health["parked"]) == (150, 0, 0)
        assert health["slots"] == 16

    _serve(scenario)


def test_loading_replica_parks_and_then_serves():
    ready = threading.Event()
    engine = ScriptedEngine()

    def make():
        assert ready.wait(timeout=20)
        return engine

    async def main():
        server = LLMServer(make, run_id="r")
        assert server.state == "loading"
        task = asyncio.create_task(server.generate("a", [1], _params()))
        await _until_parked(server)
        ready.set()
        assert (await task).token_ids == [100, 101, 102, 103]
        assert server.state == "ready"
        await server.close()

    asyncio.run(main())


def test_abort_returns_partial_tokens_and_parks_until_resume():
    async def scenario(server, engine):
        a, b = await _started(server, engine, "a", "b")
        assert await server.abort(_key()) == 2
        for task in (a, b):
            output = await task
            assert output.stop_reason == "aborted"
            assert output.token_ids == [100 + k for k in range(len(output.token_ids))]
            assert output.token_ids
        assert server.state == "paused"
        parked = asyncio.create_task(server.generate("c", [1], _params()))
        await _until_parked(server)
        steps = engine.num_steps
        await asyncio.sleep(0.02)
        assert engine.num_steps == steps
        await server.resume(_key())
        assert (await parked).stop_reason == "length"
        assert server.state == "ready"

    _serve(scenario)


def test_pause_keep_freezes_and_resume_goes_on():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "a", max_tokens=200)
        await server.pause(_key(), keep=True)
        seen = (await server.partial("a")).token_ids
        await asyncio.sleep(0.02)
        assert (await server.partial("a")).token_ids == seen
        assert server.state == "paused"
        await server.resume(_key())
        output = await task
        assert len(output.token_ids) == 200
        assert output.token_ids[: len(seen)] == seen

    _serve(scenario, ScriptedEngine(step_s=0.003))


def test_pause_without_keep_drains():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "a", max_tokens=150)
        pause = asyncio.create_task(server.pause(_key(), keep=False))
        while server.state != "draining":
            await asyncio.sleep(0)
            assert not task.done()
        late = asyncio.create_task(server.generate("late", [1], _params()))
        await pause
        assert (await task).stop_reason == "length"
        assert server.state == "paused"
        assert not late.done()
        await server.resume(_key())
        await late

    _serve(scenario, ScriptedEngine(step_s=0.003))


def test_sleep_frees_and_a_request_wakes_with_the_committed_weights():
    async def scenario(server, engine):
        await server.sleep(_key())
        await server.sleep(_key())  # a repeated call
        assert (server.state, engine.has_cache) == ("asleep", False)
        await server.prepare_weights(_key(), 3)
        await server.load_weights(_key(), _meta(3))
        early = asyncio.create_task(server.generate("a", [1], _params()))
        await _until_parked(server)
        assert server.state == "asleep"
        await server.commit_weights(_key(), 3)
        assert (await early).weight_versions == [3] * 4
        assert server.state == "ready"
        assert engine.calls.index("commit 3") < engine.calls.index("restore")
        await server.wake_up(_key())

    _serve(scenario)


def test_sleep_with_requests_in_flight_is_an_error_at_once():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "busy")
        with pytest.raises(ReplicaBusyError, match=r"1 requests in flight \(busy\)"):
            await server.sleep(_key())
        assert server.state == "ready"
        await server.abort(_key())
        await task
        await server.sleep(_key())

    _serve(scenario)


def test_weight_update_gates_freezes_and_names_versions_per_token():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "a")
        await server.prepare_weights(_key(), 2)
        frozen = len((await server.partial("a")).token_ids)
        parked = asyncio.create_task(server.generate("b", [1], _params()))
        await _until_parked(server)
        reply = await server.load_weights(_key(), _meta(2))
        assert reply == {"version": 2, "num_bytes": 8, "checksum": "c"}
        await asyncio.sleep(0.02)
        assert len((await server.partial("a")).token_ids) == frozen
        assert not parked.done()
        await server.commit_weights(_key(), 2)
        await server.commit_weights(_key(), 2)  # a repeated call
        assert (await parked).weight_versions == [2] * 4
        await server.abort(_key())
        versions = (await task).weight_versions
        assert versions[:frozen] == [0] * frozen
        assert set(versions[frozen:]) == {2}
        assert (await server.health())["weight_version"] == 2

    _serve(scenario)


def test_abandon_reopens_with_the_old_weights():
    async def scenario(server, engine):
        await server.prepare_weights(_key(), 5)
        await server.load_weights(_key(), _meta(5))
        await server.abandon_weights(_key(), 5)
        await server.abandon_weights(_key(), 5)  # a repeated call
        assert (await server.generate("a", [1], _params())).weight_versions == [0] * 4
        with pytest.raises(WeightSyncError, match="one set of bytes"):
            await server.prepare_weights(_key(2), 5)
            await server.load_weights(_key(2), _meta(5, checksum="other"))
        await server.abandon_weights(_key(2), 5)

    _serve(scenario)


def test_steps_of_an_update_out_of_order_are_errors_at_once():
    async def scenario(server, engine):
        with pytest.raises(WeightSyncError, match="prepared is none"):
            await server.load_weights(_key(), _meta(1))
        with pytest.raises(WeightSyncError, match="prepared is none"):
            await server.commit_weights(_key(), 1)
        await server.prepare_weights(_key(), 1)
        with pytest.raises(WeightSyncError, match="not loaded"):
            await server.commit_weights(_key(), 1)
        with pytest.raises(WeightSyncError, match="prepared is version 1"):
            await server.load_weights(_key(), _meta(2))
        with pytest.raises(WeightSyncError, match="commit or abandon"):
            await server.prepare_weights(_key(), 2)
        # A newer caller takes over what was left open.
        await server.prepare_weights(_key(try_number=2), 2)
        await server.load_weights(_key(try_number=2), _meta(2))
        await server.commit_weights(_key(try_number=2), 2)
        assert [c for c in engine.calls if c.startswith(("stage", "commit"))] == [
            "stage 2",
            "commit 2",
        ]

    _serve(scenario)


def test_older_callers_are_fenced():
    async def scenario(server, engine):
        await server.sleep(_key(step=4, try_number=2))
        with pytest.raises(FencedError, match="try 2"):
            await server.wake_up(_key(step=4, try_number=1))
        with pytest.raises(FencedError, match="run r"):
            await server.wake_up(_key(run_id="other"))
        await server.wake_up(_key(attempt=2))
        with pytest.raises(FencedError, match="attempt 2 has begun"):
            await server.abort(_key(attempt=1, step=9))

    _serve(scenario)


def test_control_calls_do_not_wait_behind_generation():
    async def scenario(server, engine):
        waiting = [
            asyncio.create_task(server.generate(f"q{i}", [1], _params(LONG))) for i in range(2000)
        ]
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await server.pause(_key(), keep=True)
        health = await server.health()
        assert time.monotonic() - begin < 5
        assert health["in_flight"] == 2000
        await server.abort(_key())
        outputs = await asyncio.gather(*waiting)
        assert {o.stop_reason for o in outputs} == {"aborted"}

    _serve(scenario)


def test_a_parked_request_is_overdue_and_says_why():
    async def scenario(server, engine):
        await server.prepare_weights(_key(step=7, phase="update_weights"), 6)
        with pytest.raises(DeadlineExceededError) as caught:
            await server.generate("late", [1], _params())
        for part in ("request late to be admitted", "step 7.0 phase update_weights", "version 6"):
            assert part in str(caught.value)
        assert (await server.health())["parked"] == 0
        await server.abandon_weights(_key(step=7), 6)
        assert "add late" not in engine.calls

    _serve(scenario, deadlines=ServerDeadlines(request_s=0.05))


def test_a_hung_engine_is_overdue_and_health_still_answers():
    gate = threading.Event()

    async def scenario(server, engine):
        task = asyncio.create_task(server.generate("a", [1], _params()))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceededError, match=r"replica 0: waited 0.2 s for abort"):
            await server.abort(_key())
        assert (await server.health())["in_flight"] == 1
        gate.set()
        await task

    _serve(scenario, ScriptedEngine(gate=gate), deadlines=ServerDeadlines(control_s=0.2))


def test_cancelling_a_caller_ends_its_request():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.in_flight:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        await server.sleep(_key())

    _serve(scenario)


def test_a_failing_engine_fails_everybody_with_its_reason():
    async def scenario(server, engine):
        await server.pause(_key(), keep=True)
        tasks = [
            asyncio.create_task(server.generate(f"q{i}", [1], _params(LONG))) for i in range(3)
        ]
        await _until_parked(server, 3)
        await server.resume(_key())
        for task in tasks:
            with pytest.raises(ActorUnavailableError, match="scripted failure"):
                await task
        assert server.state == "dead"
        assert "scripted failure" in (await server.health())["error"]
        for call in (server.generate("x", [1], _params()), server.wake_up(_key())):
            with pytest.raises(ActorUnavailableError, match="is dead"):
                await call

    _serve(scenario, ScriptedEngine(fail_at_step=5))


class Breaks(ScriptedEngine):
    """Raises in the calls of the control lane."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def stage_weights(self, meta):
        raise self.error

    def release_cache(self):
        raise self.error

    def partial(self, request_id):
        raise self.error


@pytest.mark.parametrize("what", ["load_weights", "sleep", "partial"])
def test_an_engine_that_breaks_in_a_control_call_is_unavailable(what):
    async def scenario(server, engine):
        running: list[asyncio.Task] = []
        if what == "load_weights":
            await server.prepare_weights(_key(), 1)
            call = server.load_weights(_key(), _meta(1))
        elif what == "sleep":
            call = server.sleep(_key())
        else:
            running.append(asyncio.create_task(server.generate("a", [1], _params(LONG))))
            while (await server.health())["in_flight"] == 0:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            call = server.partial("a")
        with pytest.raises(
            ActorUnavailableError,
            match=rf"replica 0 is dead: {what} failed: KeyError\('embed'\)",
        ):
            await call
        while server.state != "dead":  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        for task in running:
            with pytest.raises(ActorUnavailableError, match="replica 0 is dead: KeyError"):
                await task

    _serve(scenario, Breaks(KeyError("embed")))


def test_an_error_of_the_system_in_a_control_call_may_pass_and_the_engine_lives():
    async def scenario(server, engine):
        with pytest.raises(TransientError, match=r"replica 0: sleep failed: OSError\(28, 'full'\)"):
            await server.sleep(_key())
        assert (await server.generate("a", [1], _params())).stop_reason == "length"

    _serve(scenario, Breaks(OSError(28, "full")))


def test_an_engine_that_was_asleep_is_not_taken_for_a_silent_one_when_it_wakes():
    """Waking up takes as long as the test wants; a request is in flight meanwhile."""
    wakes = threading.Event()

    class Slow(ScriptedEngine):
        def restore_cache(self):
            assert wakes.wait(20)
            super().restore_cache()

    async def scenario(server, engine):
        await server.sleep(_key())
        await asyncio.sleep(1.5)
        task = asyncio.create_task(server.generate("a", [1], _params()))
        while (health := await server.health())["in_flight"] == 0:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        assert health["last_step_age_s"] < 1.0
        # But one that hangs there is.
        await asyncio.sleep(0.5)
        assert (await server.health())["last_step_age_s"] >= 0.5
        wakes.set()
        await task

    _serve(scenario, Slow())


def test_an_engine_that_cannot_be_built_is_reported():
    def make():
        raise ConfigError("no such model")

    async def main():
        server = LLMServer(make, run_id="r")
        with pytest.raises(ConfigError, match="no such model"):
            await server.wait_ready(10)
        assert server.state == "dead"
        await server.close()

    asyncio.run(main())


def test_bad_requests_are_refused_and_harm_nobody():
    async def scenario(server, engine):
        (task,) = await _started(server, engine, "a")
        with pytest.raises(ConfigError, match="no prompt"):
            await server.generate("b", [], _params())
        with pytest.raises(ConfigError, match="max_tokens"):
            await server.generate("b", [1], {"seed": 1})
        with pytest.raises(RolloutError, match="a is here already"):
            await server.generate("a", [1], _params())
        await server.abort(_key())
        assert (await task).stop_reason == "aborted"

    _serve(scenario)


def test_partial_knows_running_requests_only():
    async def scenario(server, engine):
        assert await server.partial("a") is None
        (task,) = await _started(server, engine, "a")
        part = await server.partial("a")
        assert part.token_ids[:1] == [100]
        assert part.stop_reason == ""
        await server.abort(_key())
        await task
        assert await server.partial("a") is None

    _serve(scenario)
