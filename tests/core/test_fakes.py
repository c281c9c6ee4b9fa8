"""The fakes keep the contracts of the protocols they stand for."""

from __future__ import annotations

import asyncio

import pytest

from perilune.core.errors import ContextLengthError, EngineError, OverloadedError, RequestError
from perilune.core.fakes import FakeEngine, ScriptedModel
from perilune.core.protocols import ChatModel, Engine
from perilune.core.types import (
    ChatRequest,
    CompletionRequest,
    Finish,
    SamplingParams,
    TextDelta,
    TokenRequest,
    Usage,
)

EOS = 258


def request(prompt=(1, 2, 3), **fields) -> TokenRequest:
    return TokenRequest(request_id="r", prompt_ids=prompt, **({"max_tokens": 10} | fields))


def run(engine: Engine, token_request: TokenRequest) -> list:
    async def collect() -> list:
        return [event async for event in engine.generate(token_request)]

    return asyncio.run(collect())


def outline(events) -> tuple[list, str | None]:
    return [event.token_id for event in events], events[-1].finish_reason


def test_the_default_script_is_an_echo_with_an_end():
    assert outline(run(FakeEngine(), request())) == ([1, 2, 3, EOS], "stop")


def test_only_the_last_event_has_a_finish_reason():
    assert [e.finish_reason for e in run(FakeEngine(), request())[:-1]] == [None] * 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 2}, ([1, 2], "length")),
        ({"stop_ids": frozenset({2})}, ([1, 2], "stop")),
        ({"max_tokens": 3, "stop_ids": frozenset({3})}, ([1, 2, 3], "stop")),
        ({"prompt": (1, EOS, 2)}, ([1, EOS], "stop")),
        ({"prompt": (1, EOS, 2), "ignore_eos": True, "max_tokens": 3}, ([1, EOS, 2], "length")),
    ],
)
def test_where_a_sequence_ends(fields, expected):
    assert outline(run(FakeEngine(), request(**fields))) == expected


def test_a_script_without_end_is_read_only_as_far_as_needed():
    engine = FakeEngine(lambda request: iter(lambda: 7, None))
    assert outline(run(engine, request(max_tokens=3))) == ([7, 7, 7], "length")


@pytest.mark.parametrize(
    ("engine", "token_request", "error"),
    [
        (FakeEngine(), request(()), RequestError),
        (FakeEngine(), request((512,)), RequestError),
        (FakeEngine(), request(sampling=SamplingParams(logit_bias={600: 1.0})), RequestError),
        (FakeEngine(max_context=3), request(), ContextLengthError),
        (FakeEngine(max_open=0), request(), OverloadedError),
    ],
)
def test_what_is_refused(engine, token_request, error):
    with pytest.raises(error):
        run(engine, token_request)
    assert engine.num_open == 0


def test_failing_on_purpose():
    engine = FakeEngine()
    engine.fail_after = 1
    events = run(engine, request())
    assert outline(events) == ([1, None], "error")
    assert events[-1].error


def test_logprobs_are_of_the_chosen_token_and_the_next_ids():
    sampling = SamplingParams(logprobs=2)
    first = run(FakeEngine(), request((511,), sampling=sampling))[0]
    assert first.logprob.token_id == 511
    assert first.logprob.top == ((511, -0.5), (0, -1.5))
    assert run(FakeEngine(), request())[0].logprob is None


def test_open_sequences_and_tokens_are_counted():
    engine = FakeEngine()

    async def half() -> None:
        events = engine.generate(request())
        await anext(events)
        assert engine.num_open == engine.stats().num_running == 1
        await events.aclose()

    asyncio.run(half())
    assert engine.wait_for_open(0)
    assert engine.stats().prompt_tokens_total == 3
    assert engine.stats().generated_tokens_total == 1
    assert not engine.wait_for_open(5, timeout_s=0.001)


def test_closing_ends_open_sequences_with_an_error_and_refuses_new_ones():
    engine = FakeEngine()

    async def close() -> list:
        engine.pause()
        task = asyncio.create_task(anext(engine.generate(request())))
        await asyncio.to_thread(engine.wait_for_open, 1)
        await engine.close()
        return [await task]

    assert asyncio.run(close())[0].finish_reason == "error"
    with pytest.raises(EngineError):
        run(engine, request())


def test_a_scripted_model_plays_its_script_and_remembers_the_requests():
    finish = Finish(reason="stop", usage=Usage())
    model: ChatModel = ScriptedModel(lambda r: [TextDelta(text=r.request_id), finish])

    async def collect(events) -> list:
        return [event async for event in events]

    chat = ChatRequest(request_id="a", model="m", messages=())
    raw = CompletionRequest(request_id="b", model="m", prompt="p")
    assert asyncio.run(collect(model.chat(chat))) == [TextDelta(text="a"), finish]
    assert asyncio.run(collect(model.complete(raw))) == [TextDelta(text="b"), finish]
    assert model.requests == [chat, raw]


def test_a_scripted_error_is_raised():
    model = ScriptedModel(lambda r: [TextDelta(text="x"), OverloadedError("o", retry_after_s=1)])

    async def play() -> None:
        async for _ in model.chat(ChatRequest(request_id="a", model="m", messages=())):
            pass

    with pytest.raises(OverloadedError):
        asyncio.run(play())
