import asyncio

import pytest

from rlcore.errors import ActorUnavailableError, ConfigError, RolloutError
from rlcore.rollout.client import LLMServerClient, sampling_seed
from rlcore.rollout.router import Router
from rlcore.testing.rollout import CountingReplica
from rlcore.types import TokenOutput

PARAMS = {"temperature": 1.0, "stop_token_ids": [2]}
PROMPT = [5, 6, 7]


def client_of(*replicas, empty_deadline_s=1.0, flush_interval_s=0.01):
    router = Router(
        {f"replica-{i}": replica for i, replica in enumerate(replicas)},
        empty_deadline_s=empty_deadline_s,
    )
    return LLMServerClient(router, seed=0, flush_interval_s=flush_interval_s)


def session_of(client, session_id=0, identity="train/0/17", max_tokens=64, max_model_len=100):
    return client.for_session(
        identity, session_id, max_tokens=max_tokens, max_model_len=max_model_len
    )


def generate(client, params=PARAMS, prompt=PROMPT, **session):
    return asyncio.run(session_of(client, **session).generate("request", prompt, params))


def test_an_aborted_request_keeps_its_tokens_and_goes_on_with_the_budget_that_is_left():
    replica = CountingReplica(aborts=[5, 5])
    output = generate(client_of(replica))
    asked = [(length, params["max_tokens"], params["position"])
             for _, length, params in replica.requests]  # fmt: skip
    assert asked == [(3, 64, 0), (8, 59, 5), (13, 54, 10)]
    uninterrupted = generate(client_of(CountingReplica()))
    assert output.token_ids == uninterrupted.token_ids
    assert output.log_probs == uninterrupted.log_probs
    assert output.stop_reason == "length"
    assert output.extra_fields["num_parts"] == 3


def test_every_token_keeps_the_version_that_sampled_it():
    class Updated(CountingReplica):
        async def generate(self, request_id, prompt_ids, sampling_params):
            output = await super().generate(request_id, prompt_ids, sampling_params)
            self.version += 1
            return output

    output = generate(client_of(Updated(aborts=[4, 1], version=6, num_tokens=7)))
    assert output.weight_versions == [6] * 4 + [7] + [8] * 2
    assert output.stop_reason == "completed"
    assert output.token_ids[-1] == 2


def test_an_abort_at_the_end_of_the_budget_ends_the_request():
    replica = CountingReplica(aborts=[64])
    output = generate(client_of(replica))
    assert (len(output.token_ids), output.stop_reason, len(replica.requests)) == (64, "length", 1)


def test_a_killed_replicas_request_goes_on_elsewhere_from_what_was_flushed():
    async def run():
        dying = CountingReplica(dies_after=9, delay_s=0.1)
        other = CountingReplica(num_tokens=20)
        client = client_of(dying, other)
        output = await session_of(client).generate("r", PROMPT, PARAMS)
        assert client.router.names == ["replica-1"]
        assert [params["position"] for _, _, params in other.requests] == [9]
        assert [length for _, length, _ in other.requests] == [3 + 9]
        return output

    output = asyncio.run(run())
    assert output.token_ids == generate(client_of(CountingReplica(num_tokens=20))).token_ids


def test_a_fast_replica_is_asked_every_few_tens_of_tokens_not_every_few_seconds():
    """64 tokens in 10 ms: 32 take 5 ms, and the least interval is 0.5 s."""

    class Asked(CountingReplica):
        num_asked = 0

        async def partial(self, request_id):
            self.num_asked += 1
            return await super().partial(request_id)

    async def run():
        quick, slow = Asked(delay_s=0.01), Asked(delay_s=1.3)
        client = client_of(quick, flush_interval_s=5.0)
        for _ in range(40):
            await session_of(client).generate("r", PROMPT, PARAMS)
        client.router.replace_all({"replica-1": slow})
        await session_of(client).generate("r", PROMPT, PARAMS)
        return quick.num_asked, slow.num_asked

    assert asyncio.run(run()) == (0, 2)


def test_without_any_replica_the_request_fails_after_the_deadline():
    client = client_of(CountingReplica(dies_after=0), empty_deadline_s=0.05)
    with pytest.raises(ActorUnavailableError, match=r"waited 0.05 s for a replica"):
        generate(client)


def test_the_seed_follows_from_run_prompt_session_and_turn_only():
    def tokens(request_id="request", **session):
        async def run():
            turns = session_of(client_of(CountingReplica()), **session)
            return [(await turns.generate(request_id, PROMPT, PARAMS)).token_ids for _ in range(2)]

        return asyncio.run(run())

    first = tokens()
    assert first == tokens(request_id="another")
    assert first[0] != first[1]
    assert first != tokens(session_id=1)
    assert first != tokens(identity="train/0/18")
    # sha256("0\ntrain/0/17\n0\n0"): fixed for ever, or no run could be repeated.
    assert sampling_seed(0, "train/0/17", 0, 0) == 0x2ED2B32B4D362F39


@pytest.mark.parametrize(
    ("wanted", "prompt_length", "budget"),
    [(None, 3, 64), (10, 3, 10), (None, 60, 40), (80, 3, 64), (50, 90, 10)],
)
def test_a_turn_never_exceeds_its_budget_nor_the_model_length(wanted, prompt_length, budget):
    replica = CountingReplica()
    params = PARAMS if wanted is None else {**PARAMS, "max_tokens": wanted}
    output = generate(client_of(replica), params, prompt=[1] * prompt_length)
    assert replica.requests[0][2]["max_tokens"] == budget == len(output.token_ids)


def test_a_turn_without_room_asks_nobody():
    replica = CountingReplica()
    output = generate(client_of(replica), prompt=[1] * 100)
    assert (output.token_ids, output.stop_reason, replica.requests) == ([], "length", [])


def test_media_are_refused():
    async def run(**media):
        return await session_of(client_of(CountingReplica())).generate("r", PROMPT, PARAMS, **media)

    assert len(asyncio.run(run(image_data=None)).token_ids) == 64
    with pytest.raises(ConfigError, match="image_data: only text models are served"):
        asyncio.run(run(image_data=["image"], video_data=None))


def test_a_replica_that_breaks_the_contract_is_named():
    class Broken(CountingReplica):
        async def generate(self, request_id, prompt_ids, sampling_params):
            return TokenOutput(
                token_ids=[1, 2], log_probs=[0.0], weight_versions=[0, 0], stop_reason="length"
            )

    with pytest.raises(RolloutError, match="replica-0 returned 2 tokens, 1 log-probs and 2"):
        generate(client_of(Broken()))


def test_a_cancelled_session_cancels_its_request():
    async def run():
        replica = CountingReplica(delay_s=30)
        client = client_of(replica)
        running = asyncio.create_task(session_of(client).generate("r", PROMPT, PARAMS))
        await asyncio.sleep(0.05)
        assert client.router.in_flight == {"replica-0": 1}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert client.router.in_flight == {"replica-0": 0}
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


class Growing(CountingReplica):
    """Samples a token every 10 ms; the first one dies after `dies_after`."""

    async def _respond(self, request_id, sampling_params):
        num_tokens = sampling_params["max_tokens"]
        for count in range(1, num_tokens + 1):
            self._partial[request_id] = self._output(sampling_params, count, "")
            await asyncio.sleep(0.01)
            if count == self._dies_after:
                raise ActorUnavailableError("the replica was killed by the test")
        return self._output(sampling_params, num_tokens, "length")


@pytest.mark.parametrize("flush_interval_s", [5.0, None])
def test_who_watches_a_request_sees_it_grow_over_the_death_of_its_replica(flush_interval_s):
    first, second = Growing(dies_after=30), Growing()
    client = client_of(first, second, flush_interval_s=flush_interval_s)
    seen = []
    session = session_of(client)
    output = asyncio.run(
        session.generate("r", PROMPT, {**PARAMS, "max_tokens": 60}, on_partial=seen.append)
    )
    assert len(output.token_ids) == 60
    assert len(seen) >= 4
    for partial in seen:
        assert partial.token_ids == output.token_ids[: len(partial.token_ids)]
        assert partial.log_probs == output.log_probs[: len(partial.token_ids)]
    # Whether what was seen is kept is the flush interval's business alone.
    [(_, _, params)] = second.requests
    assert (params["position"] > 0) == (flush_interval_s is not None)
    assert client._num_watched == 0
