"""The asynchronous door, on the fake model: streams, aborts, faults, closing."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from perilune.core.errors import OverloadedError
from perilune.core.types import SamplingParams, TokenRequest
from perilune.engine.errors import EngineClosedError
from perilune.engine.fake_pools import Fed
from perilune.engine.host import FAILURE

RequestOf = Callable[..., TokenRequest]
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 9], [1], [2] * 30, [3, 1, 4, 1, 5], [60], [8, 8, 8], list(range(40)), [33, 2]]


def test_eight_streams_get_what_each_gets_alone(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=4, frequency_penalty=0.3)
        requests = [
            request_of(prompt, max_tokens=20, sampling=GREEDY if i % 2 else sampled)
            for i, prompt in enumerate(PROMPTS)
        ]
        async with serve(max_running=5, prefill_budget=16) as served:
            alone = [await served.token_ids(request) for request in requests]
            together = await asyncio.gather(*map(served.token_ids, requests))
            assert together == alone
            assert alone[1] == served.model.continuation(PROMPTS[1], 20)
            assert max(map(len, served.model.calls)) > 1, "nothing was batched"
            stats = await served.settled(lambda stats: stats.num_running == 0)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.prefix_cache_hit_tokens_total > 0
        assert served.core.stats().cache_bytes == 0, "the closed engine holds memory"
        assert stats.generated_tokens_total == 2 * 8 * 20
        assert stats.prompt_tokens_total == 2 * sum(map(len, PROMPTS))

    asyncio.run(run())


def test_a_seed_gives_the_same_tokens_in_every_company(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        seeded = request_of([7, 7], max_tokens=30, sampling=SamplingParams(seed=123))
        others = [request_of([i], max_tokens=3 + 5 * i) for i in range(1, 6)]
        async with serve() as served:
            alone = await served.token_ids(seeded)
            for company in (others[:1], others[1:4], others):
                tasks = map(served.token_ids, [*company, seeded, *company])
                assert (await asyncio.gather(*tasks))[len(company)] == alone
            other_seed = request_of([7, 7], max_tokens=30, sampling=SamplingParams(seed=124))
            assert await served.token_ids(other_seed) != alone

    asyncio.run(run())


def test_penalties_see_what_has_been_generated(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        no_repeats = SamplingParams(frequency_penalty=100.0, seed=1)
        async with serve() as served:
            ids = await served.token_ids(request_of([1], max_tokens=64, sampling=no_repeats))
        assert sorted(ids) == list(range(64))

    asyncio.run(run())


def test_the_last_event_says_why(serve, request_of: RequestOf, info) -> None:
    async def run() -> None:
        [eos_id] = info.eos_ids
        to_eos = SamplingParams(temperature=0, logit_bias={eos_id: 100.0})
        async with serve() as served:
            [event] = await served.collect(request_of([1], sampling=to_eos, ignore_eos=False))
            assert (event.token_id, event.finish_reason) == (eos_id, "stop")
            events = await served.collect(request_of([1], 3, sampling=to_eos))
            assert [e.finish_reason for e in events] == [None, None, "length"]
            second = served.model.continuation([1], 2)[1]
            stopped = request_of([1], sampling=GREEDY, stop_ids=frozenset({second}))
            assert [e.finish_reason for e in await served.collect(stopped)] == [None, "stop"]
            long = request_of([1] * (info.max_context - 2), 50, sampling=GREEDY)
            assert [e.finish_reason for e in await served.collect(long)] == [None, "length"]

    asyncio.run(run())


def test_logprobs_come_with_every_token(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve() as served:
            events = await served.collect(
                request_of([4], 5, sampling=SamplingParams(temperature=0, logprobs=2))
            )
            for event in events:
                assert event.logprob.token_id == event.token_id == event.logprob.top[0][0]
                assert len(event.logprob.top) == 2
            [plain] = await served.collect(request_of([4], 1, sampling=GREEDY))
            assert plain.logprob is None

    asyncio.run(run())


def test_closing_an_iterator_frees_its_place_while_the_model_runs(
    serve, request_of: RequestOf
) -> None:
    """And its memory behind the step."""

    async def run() -> None:
        async with serve(max_running=1) as served:
            gate = served.hold(after=1)
            events = served.engine.generate(request_of([1], max_tokens=90))
            await anext(events)
            await gate.wait_until_reached()
            [sequence] = served.core.scheduler.running
            held = weakref.ref(sequence.held.pages)
            await events.aclose()
            await served.settled(lambda stats: stats.num_running == 0)
            assert sequence.finish_reason == "abort"
            # The freed place serves at once; of the step in flight nobody hears.
            gate.open()
            expected = served.model.continuation([2], 4)
            assert await served.token_ids(request_of([2], 4, sampling=GREEDY)) == expected
            assert sequence.held is None
            assert served.engine.stats().generated_tokens_total == 1 + 4
            gc.collect()
            assert held() is None

    asyncio.run(run())


def test_cancelling_a_task_frees_its_sequence(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve(max_running=1) as served:
            gate = served.hold()
            tasks = [
                asyncio.create_task(served.token_ids(request_of([i], max_tokens=9)))
                for i in range(3)
            ]
            await gate.wait_until_reached()
            await served.settled(lambda stats: stats.num_waiting == 2)
            for task in tasks[:2]:
                task.cancel()
            await asyncio.wait(tasks[:2])
            await served.settled(lambda stats: (stats.num_running, stats.num_waiting) == (1, 0))
            gate.open()
            assert len(await tasks[2]) == 9

    asyncio.run(run())


def test_a_full_queue_refuses_and_recovers(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve(max_running=2, max_waiting=1) as served:
            gate = served.hold()
            tasks = [asyncio.create_task(served.token_ids(request_of([i]))) for i in range(3)]
            await gate.wait_until_reached()
            with pytest.raises(OverloadedError, match="2 sequences run and 1 wait") as full:
                await served.collect(request_of([4]))
            assert full.value.retry_after_s > 0
            gate.open()
            assert [len(ids) for ids in await asyncio.gather(*tasks)] == [8, 8, 8]
            assert len(await served.collect(request_of([4]))) == 8

    asyncio.run(run())


def test_a_request_of_many_sequences_leaves_room_for_another(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve(max_running=4) as served:
            gate = served.hold()
            many = [
                asyncio.create_task(served.collect(request_of([i], 50, request_id="many")))
                for i in range(8)
            ]
            await gate.wait_until_reached()
            order = [*many, asyncio.create_task(served.collect(request_of([9], request_id="one")))]
            await asyncio.sleep(0)
            gate.open()
            await asyncio.wait(order, return_when=asyncio.FIRST_COMPLETED)
            assert [task.done() for task in order] == [False] * 8 + [True]
            await asyncio.wait(order)

    asyncio.run(run())


def test_a_model_that_raises_ends_every_open_request_and_the_engine_goes_on(
    serve, request_of: RequestOf, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serve(max_running=2) as served:

            def break_down(step: Sequence[Fed]) -> None:
                if any(fed.length >= 5 for fed in step):
                    raise ValueError("broken on purpose")

            served.model.on_call = break_down
            tasks = [served.collect(request_of([i], max_tokens=20)) for i in range(4)]
            for events in await asyncio.gather(*tasks):
                assert events[-1].finish_reason == "error"
                assert events[-1].token_id is None
                assert events[-1].error is not None
                assert all(event.error is None for event in events[:-1])
            served.core.scheduler.check()
            assert served.engine.stats().cache_bytes == 0
            served.model.on_call = lambda step: None
            assert len(await served.collect(request_of([1], max_tokens=20))) == 20

    with caplog.at_level(logging.ERROR, logger="perilune.engine"):
        asyncio.run(run())
    assert "broken on purpose" in caplog.text


@pytest.mark.parametrize("fault", [SystemExit, torch.AcceleratorError])
def test_a_fatal_fault_ends_every_request_and_refuses_new_ones(
    serve, request_of: RequestOf, caplog: pytest.LogCaptureFixture, fault: type[BaseException]
) -> None:
    async def run() -> None:
        async with serve(max_running=2) as served:

            def break_down(step: Sequence[Fed]) -> None:
                if any(fed.length >= 5 for fed in step):
                    raise fault("broken for good")

            served.model.on_call = break_down
            assert served.engine.stats().failure is None
            tasks = [served.collect(request_of([i], max_tokens=20)) for i in range(4)]
            for events in await asyncio.wait_for(asyncio.gather(*tasks), 30):
                assert events[-1].finish_reason == "error"
                assert events[-1].error == FAILURE
            stats = served.engine.stats()
            assert (stats.failure, stats.cache_bytes) == (FAILURE, 0)
            with pytest.raises(EngineClosedError, match="has failed") as refused:
                await served.collect(request_of([1]))
            assert refused.value.status == 503

    asyncio.run(run())
    assert "broken for good" in caplog.text


def test_logits_that_are_not_finite_end_only_their_sequence(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve() as served:
            clean = served.model.logits
            served.model.logits = lambda ids: clean(ids) * (float("nan") if ids[0] == 13 else 1)
            bad, good = await asyncio.gather(
                served.collect(request_of([13])), served.collect(request_of([14]))
            )
            assert [(e.finish_reason, e.token_id) for e in bad] == [("error", None)]
            assert "not finite" in bad[0].error
            assert len(good) == 8

    asyncio.run(run())


def test_close_ends_open_requests_with_an_error(serve, request_of: RequestOf) -> None:
    async def run() -> None:
        async with serve(max_running=2) as served:
            gate = served.hold()
            tasks = [asyncio.create_task(served.collect(request_of([i]))) for i in range(4)]
            await gate.wait_until_reached()
            closing = asyncio.create_task(served.engine.close())
            # The answers do not wait for the step that is still running.
            for events in await asyncio.gather(*tasks):
                assert [e.finish_reason for e in events] == ["error"]
                assert "shutting down" in events[0].error
            gate.open()
            await closing
            assert served.core.stats().cache_bytes == 0
            with pytest.raises(EngineClosedError):
                await served.collect(request_of([1]))
            assert EngineClosedError.status == 503

    asyncio.run(run())
