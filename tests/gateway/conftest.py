"""A real server on a loopback port, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import uvloop
from openai import OpenAI

from perilune.core.errors import OverloadedError
from perilune.core.fakes import FakeEngine, ScriptedModel, echo
from perilune.core.types import Finish, Message, TextDelta, TextPart, ToolCall, Usage
from perilune.gateway.app import Gateway
from perilune.gateway.backends.local import LocalModel
from perilune.gateway.router import Route, Router
from perilune.gateway.server import Address, free_address, listening
from perilune.telemetry.metrics import ServerMetrics
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat

PING_INTERVAL_S = 0.2


def _written_ids(text: str, *, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> list[int]:
    """What a model writes for this answer, control tokens included."""
    answer = Message(
        role="assistant",
        content=(TextPart(text=text),),
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )
    turn = (Message(role="user", content=(TextPart(text="?"),)), answer)
    both = XtmlFormat(byte_level()).encode_conversation(turn)
    return [token for token, written in zip(both.ids, both.loss_mask, strict=True) if written]


@pytest.fixture(scope="session")
def written_ids() -> Callable[..., list[int]]:
    return _written_ids


@dataclass
class Served:
    """The running server, and what a test may touch from its own thread."""

    address: Address
    engine: FakeEngine
    scripted: ScriptedModel
    loop: asyncio.AbstractEventLoop

    def pause(self) -> None:
        self._in_loop(self.engine.pause)

    def resume(self) -> None:
        self._in_loop(self.engine.resume)

    def _in_loop(self, call) -> None:
        done: Future[None] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(call()))
        done.result(timeout=10)


def _scripted_events(request) -> list:
    """The answer is named by the request's only message or its prompt."""
    prompt = getattr(request, "prompt", None) or request.messages[-1].content[0].text
    one = TextDelta(text="one")
    return {
        "overloaded": [OverloadedError("the queue is full", retry_after_s=2.5)],
        "bug": [ValueError("secret detail")],
        "late bug": [one, ValueError("secret detail")],
        "no finish": [one],
        "ok": [one, Finish(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))],
    }[prompt]


@pytest.fixture(scope="session")
def _served() -> Iterator[Served]:
    started: Future[Served] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        engine, scripted = FakeEngine(), ScriptedModel(_scripted_events)
        local = LocalModel(engine, XtmlFormat(byte_level()))
        metrics = ServerMetrics()
        metrics.watch_engine(local.model_id, engine.stats)
        router = Router([Route(model=local, max_context=local.max_context), Route(model=scripted)])
        gateway = Gateway(router, metrics, ping_interval_s=PING_INTERVAL_S)
        address = free_address("127.0.0.1", 0)
        async with listening(gateway, address):
            loop = asyncio.get_running_loop()
            started.set_result(Served(address, engine, scripted, loop))
            await stop.wait()

    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    served = started.result(timeout=30)
    yield served
    served.loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=30)


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    """The server, with an engine that is as new and, afterwards, has nothing left open."""
    engine = _served.engine
    engine.script, engine.fail_after, engine.token_delay_s = echo, None, 0.0
    engine.requests.clear()
    yield _served
    _served.resume()
    assert engine.wait_for_open(0)


@pytest.fixture
def engine(served: Served) -> FakeEngine:
    return served.engine


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.address.url}/v1", api_key="none", max_retries=0) as client:
        yield client
