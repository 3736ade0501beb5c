import asyncio
from contextlib import AsyncExitStack

import pytest

from rlcore.cluster.ray_replica import RayReplica
from rlcore.errors import ActorUnavailableError
from rlcore.rollout.router import Router
from rlcore.testing.rollout import CountingReplica


def pool(*names):
    return {name: CountingReplica() for name in names}


async def hold(stack, router, key):
    name, _ = await stack.enter_async_context(router.acquire(key))
    return name


def test_requests_go_to_the_replica_with_least_in_flight():
    async def run():
        router = Router(pool("b", "a", "c"))
        async with AsyncExitStack() as stack:
            names = [await hold(stack, router, f"key-{i}") for i in range(6)]
            assert names == ["a", "b", "c", "a", "b", "c"]
            assert router.in_flight == {"a": 2, "b": 2, "c": 2}
        assert router.in_flight == {"a": 0, "b": 0, "c": 0}

    asyncio.run(run())


def test_a_session_stays_until_its_replica_has_too_much_more_than_the_others():
    async def run():
        router = Router(pool("a", "b"), load_cap=2)
        async with AsyncExitStack() as stack:
            # Sticky: 1, 2, 3 in flight beside 0; at 3 it is over the cap of 2 and moves for good.
            assert [await hold(stack, router, "s") for _ in range(5)] == ["a", "a", "a", "b", "b"]

    asyncio.run(run())


def test_full_determinism_depends_on_the_key_only():
    async def run(order):
        router = Router(pool("a", "b", "c"), full_determinism=True)
        async with AsyncExitStack() as stack:
            return {key: await hold(stack, router, key) for key in order}

    keys = [f"train/0/{i}" for i in range(30)]
    one, two = asyncio.run(run(keys)), asyncio.run(run(keys[::-1]))
    assert one == two
    assert set(one.values()) == {"a", "b", "c"}


def test_replicas_leave_and_join_while_requests_run():
    async def run():
        router = Router(pool("a", "b"))
        async with router.acquire("s") as (name, old):
            assert name == "a"
            router.remove("a")
            async with router.acquire("s") as (name, _):
                assert name == "b"
            fresh = CountingReplica()
            router.add("a", fresh)
            # A late report about the old one does not remove the new one.
            router.remove("a", old)
            assert router.in_flight == {"a": 0, "b": 0}
            async with router.acquire("t") as (name, replica):
                assert (name, replica) == ("a", fresh)
                assert router.in_flight["a"] == 1
        # The old replica's request ended after the new one joined: no negative count.
        assert router.in_flight == {"a": 0, "b": 0}
        router.replace_all(pool("c"))
        assert router.names == ["c"]

    asyncio.run(run())


def test_a_request_waits_for_a_replica_to_join_and_says_so_when_none_does():
    async def run():
        router = Router(pool("a"), empty_deadline_s=5)
        router.remove("a")
        waiting = asyncio.create_task(hold(stack := AsyncExitStack(), router, "s"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        router.add("b", CountingReplica())
        assert await waiting == "b"
        await stack.aclose()

        router = Router({}, empty_deadline_s=0.01)
        router.add("gone", CountingReplica())
        router.remove("gone")
        with pytest.raises(ActorUnavailableError, match="none serves; known so far: gone"):
            await hold(stack, router, "s")

    asyncio.run(run())


def test_who_hears_of_the_same_replicas_again_forgets_nothing_of_them():
    async def run():
        router = Router({name: RayReplica(f"actor {name}", name) for name in "ab"}, load_cap=0)
        async with AsyncExitStack() as stack:
            assert [await hold(stack, router, f"key-{i}") for i in range(3)] == ["a", "b", "a"]
            # The same actors in new wrappers, but for b.
            handles = {"a": "actor a", "b": "another actor", "c": "actor c"}
            router.replace_all({n: RayReplica(handle, n) for n, handle in handles.items()})
            assert router.in_flight == {"a": 2, "b": 0, "c": 0}
            assert await hold(stack, router, "key-3") == "b"
        assert router.in_flight == {"a": 0, "b": 0, "c": 0}

    asyncio.run(run())
