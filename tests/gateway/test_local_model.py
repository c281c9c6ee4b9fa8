"""The local backend by itself, without HTTP."""

from __future__ import annotations

import asyncio

import pytest

from perilune.core.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    OverloadedError,
)
from perilune.core.fakes import FakeEngine
from perilune.core.types import (
    ChatRequest,
    CompletionRequest,
    Finish,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
    ToolCall,
    ToolCallDelta,
)
from perilune.gateway.backends.local import LocalModel
from perilune.text.errors import TextError
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat

USER = Message(role="user", content=(TextPart(text="hi"),))


def model_of(engine: FakeEngine) -> LocalModel:
    return LocalModel(engine, XtmlFormat(byte_level()))


def chat(*messages: Message, **fields) -> ChatRequest:
    return ChatRequest(request_id="r", model="fake", messages=messages or (USER,), **fields)


def complete(prompt="hi", **fields) -> CompletionRequest:
    return CompletionRequest(request_id="r", model="fake", prompt=prompt, **fields)


def run(events) -> list:
    async def collect() -> list:
        return [event async for event in events]

    return asyncio.run(collect())


def test_the_order_of_an_answer(written_ids):
    call = ToolCall(id="", name="f", arguments="{}")
    engine = FakeEngine(lambda request: written_ids("text", reasoning="why", calls=[call]))
    kinds = [type(event) for event in run(model_of(engine).chat(chat()))]
    assert kinds == [ReasoningDelta] * 3 + [TextDelta] * 4 + [ToolCallDelta, Finish]


def test_text_that_waits_for_a_stop_string_comes_before_a_call(written_ids):
    call = ToolCall(id="", name="f", arguments="{}")
    engine = FakeEngine(lambda request: written_ids("text ST", calls=[call]))
    *_, text, tool_call, finish = run(model_of(engine).chat(chat(stop=("STOP",))))
    assert text == TextDelta(text="ST")
    assert isinstance(tool_call, ToolCallDelta)
    assert finish.reason == "tool_calls"


def test_a_call_behind_a_stop_string_is_not_made(written_ids):
    call = ToolCall(id="", name="f", arguments="{}")
    engine = FakeEngine(lambda request: written_ids("text STOP", calls=[call]))
    events = run(model_of(engine).chat(chat(stop=("STOP",))))
    assert not any(isinstance(event, ToolCallDelta) for event in events)
    assert events[-1].reason == "stop"


def test_an_answer_cut_in_a_call_is_cut_by_length(written_ids):
    call = ToolCall(id="", name="f", arguments='{"a": "b"}')
    whole = written_ids("t", calls=[call])
    engine = FakeEngine(lambda request: whole)
    events = run(model_of(engine).chat(chat(max_tokens=len(whole) - 30)))
    assert events[-1].reason == "length"
    assert not any(isinstance(event, ToolCallDelta) for event in events)


def test_a_stop_string_frees_the_sequence_at_once():
    engine = FakeEngine(lambda request: iter(lambda: ord("a"), None))
    events = run(model_of(engine).complete(complete(stop=("aaa",), max_tokens=1000)))
    assert events == [events[-1]]
    assert events[-1].reason == "stop"
    assert events[-1].usage.completion_tokens == 3
    assert engine.num_open == 0


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_an_answer_that_takes_too_long_is_given_up(endpoint):
    """The engine stands still: only the deadline can end it."""
    engine = FakeEngine()
    body = {"chat": chat, "complete": complete}[endpoint](timeout_s=0.01)

    async def ask() -> None:
        engine.pause()
        with pytest.raises(DeadlineError, match=r"the answer took longer than 0\.01 s"):
            await anext(getattr(model_of(engine), endpoint)(body))

    asyncio.run(ask())
    assert engine.num_open == 0


def test_a_deadline_that_is_far_changes_nothing():
    engine = FakeEngine(lambda request: [ord("a")] * 5)
    timed, untimed = (
        run(model_of(engine).complete(complete(timeout_s=t, max_tokens=5))) for t in (600.0, None)
    )
    assert timed == untimed


def test_closing_the_iterator_frees_the_sequence():
    engine = FakeEngine(lambda request: iter(lambda: ord("a"), None))

    async def take_one() -> tuple[int, int]:
        events = model_of(engine).complete(complete(max_tokens=1000))
        await anext(events)
        num_open = engine.num_open
        await events.aclose()
        return num_open, engine.num_open

    assert asyncio.run(take_one()) == (1, 0)


def test_cancelling_the_task_frees_the_sequence():
    engine = FakeEngine()

    async def cancel() -> int:
        engine.pause()
        task = asyncio.create_task(anext(model_of(engine).chat(chat())))
        await asyncio.to_thread(engine.wait_for_open, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return engine.num_open

    assert asyncio.run(cancel()) == 0


def test_a_limit_beyond_the_context_is_lowered_to_it():
    engine = FakeEngine(max_context=10)
    run(model_of(engine).complete(complete("abcd", max_tokens=1000)))
    assert engine.requests[0].max_tokens == 6


def test_a_prompt_that_fills_the_context_is_refused():
    engine = FakeEngine(max_context=10)
    with pytest.raises(ContextLengthError, match="10 tokens"):
        run(model_of(engine).complete(complete("x" * 10)))


def test_a_refused_prompt_is_not_echoed():
    engine = FakeEngine(max_context=10)
    with pytest.raises(ContextLengthError):
        run(model_of(engine).complete(complete("x" * 10, echo=True)))


def test_a_full_queue_is_told():
    engine = FakeEngine(max_open=0)
    with pytest.raises(OverloadedError):
        run(model_of(engine).chat(chat()))


def test_an_engine_failure_is_raised():
    engine = FakeEngine()
    engine.fail_after = 1
    with pytest.raises(EngineError, match="on purpose"):
        run(model_of(engine).complete(complete()))


def test_an_unwritable_conversation_is_refused_before_the_engine():
    engine = FakeEngine()
    with pytest.raises(TextError):
        run(model_of(engine).chat(chat(Message(role="tool", tool_call_id="x"))))
    assert engine.requests == []


def test_a_token_that_the_tokenizer_lacks_is_the_servers_fault():
    engine = FakeEngine(lambda request: [600], vocab_size=1024)
    with pytest.raises(EngineError, match="600"):
        run(model_of(engine).complete(complete()))
    assert engine.num_open == 0
