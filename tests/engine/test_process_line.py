"""The client's end of the wire, answered in frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from perilune.core.types import EngineStats, TokenEvent, TokenRequest
from perilune.engine import wire
from perilune.engine.errors import EngineClosedError
from perilune.engine.line import CRASHED, Line, connect
from perilune.engine.wire_errors import pack

REQUEST = TokenRequest(request_id="r", prompt_ids=(1,), max_tokens=9)
TOKEN = TokenEvent(request_id="r", token_id=3)


class Far(NamedTuple):
    """The engine's end, and how often the line has been lost."""

    line: Line
    sock: socket.socket
    lost: list[Line]

    def say(self, *messages: wire.FromEngine) -> None:
        self.sock.sendall(b"".join(map(wire.frame, messages)))


@asynccontextmanager
async def connected() -> AsyncIterator[Far]:
    ours, theirs = socket.socketpair()
    lost: list[Line] = []
    line = await connect(ours, lost.append)
    try:
        yield Far(line, theirs, lost)
    finally:
        line.close()
        theirs.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop


async def until_lost(far: Far) -> None:
    while True:
        if far.lost:
            return
        await asyncio.sleep(0.001)


def test_an_engine_that_says_that_it_fails_gets_no_more_calls() -> None:
    async def run() -> None:
        async with connected() as far:
            taken, untaken = far.line.call(REQUEST), far.line.call(REQUEST)
            failing = wire.Step([(taken.id, TOKEN)], EngineStats(failure="broken"))
            far.say(wire.Taken(taken.id), failing)
            assert await taken.next() == TOKEN
            last = await taken.next()
            assert last is not None
            assert (last.finish_reason, last.error) == ("error", CRASHED)
            assert await untaken.next() is None
            assert far.lost == [far.line]
            far.sock.close()
            far.line.close()
        assert far.lost == [far.line]

    asyncio.run(run())


def test_a_closed_engine_has_not_taken_a_call_up() -> None:
    async def run() -> None:
        async with connected() as far:
            call = far.line.call(REQUEST)
            far.say(wire.Refused(call.id, pack(EngineClosedError("the engine has failed"))))
            assert await call.next() is None
            assert far.lost == [far.line]

    asyncio.run(run())


def test_after_its_last_event_a_call_gets_nothing_more() -> None:
    async def run() -> None:
        async with connected() as far:
            call = far.line.call(REQUEST)
            last = TokenEvent(request_id="r", token_id=4, finish_reason="stop")
            steps = [wire.Step([(call.id, event)], EngineStats()) for event in (last, last)]
            far.say(wire.Taken(call.id), *steps)
            assert await call.next() == last
            far.sock.close()
            async with asyncio.timeout(30):
                await until_lost(far)
            assert call.unread.empty()

    asyncio.run(run())


def test_a_call_that_ended_is_not_aborted() -> None:
    async def run() -> None:
        async with connected() as far:
            ended, left = far.line.call(REQUEST), far.line.call(REQUEST)
            last = TokenEvent(request_id="r", token_id=4, finish_reason="stop")
            far.say(wire.Step([(ended.id, last)], EngineStats()))
            assert await ended.next() == last
            for call in (ended, left, left):
                far.line.hang_up(call)
            await asyncio.sleep(0)
            bodies = wire.Frames().feed(far.sock.recv(2**16))
            messages = [wire.decode_to_engine(body) for body in bodies]
        assert [m.call for m in messages if isinstance(m, wire.Generate)] == [ended.id, left.id]
        assert messages[2:] == [wire.Abort(left.id)]

    asyncio.run(run())
