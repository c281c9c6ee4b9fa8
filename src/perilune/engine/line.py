"""The client's end of the connection to one engine, in an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import msgspec

from perilune.core.errors import EngineError, RequestError
from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.errors import EngineClosedError, WireError, error_event
from perilune.engine.wire import (
    VERSION,
    Abort,
    Failed,
    Frames,
    FromEngine,
    Hello,
    Refused,
    Step,
    Taken,
    ToEngine,
    decode_from_engine,
    frame,
    request_frame,
)
from perilune.engine.wire_errors import unpack

logger = logging.getLogger(__name__)

CRASHED = "the engine crashed before the answer was complete; ask again"


@dataclass(slots=True, kw_only=True)
class Call:
    """A request under way. What is unread in it is at most the request's own tokens."""

    id: int
    request_id: str
    is_taken: bool = False
    """It has been on its way to the model."""
    unread: asyncio.Queue[TokenEvent | Exception | None] = field(default_factory=asyncio.Queue)

    async def next(self) -> TokenEvent | None:
        """The next event; None when the line is lost and the engine had not taken the request.

        Raises RequestError for a request that the engine refused.
        """
        item = await self.unread.get()
        if isinstance(item, Exception):
            raise item
        return item


class Line(asyncio.Protocol):
    """Lives as long as the connection: the calls on it end with it.

    Events are taken off the socket as they come and wait in their calls, so a reader that is slow
    holds up nobody else. Only if this whole process stands still does the engine wait for it.
    """

    def __init__(self, on_lost: Callable[[Line], None]) -> None:
        """`on_lost` is called once, when the connection has ended for whatever reason, or the
        engine has said that it ends."""
        self.stats = EngineStats()
        self._is_lost = False
        self._on_lost = on_lost
        self._hello: asyncio.Future[Hello | Failed | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._calls: dict[int, Call] = {}
        self._ids = count()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None

    async def ready(self) -> EngineInfo:
        """What the engine says of itself, once it can serve.

        Raises:
            EngineError: it died before.
            WireError: it is of another version.
            Exception: what kept it from starting.
        """
        answer = await asyncio.shield(self._hello)
        if answer is None:
            raise EngineError("its process ended before it could serve")
        if isinstance(answer, Failed):
            raise unpack(answer.error)
        if answer.version != VERSION:
            raise WireError(
                f"the engine's process is of {answer.version!r}, the server of {VERSION!r}: "
                "restart the server"
            )
        if self._is_lost:
            raise EngineError("its process ended as soon as it could serve")
        return answer.info

    def send(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    def call(self, request: TokenRequest) -> Call:
        """Sends a request, on a line that is not lost. Raises RequestError for one that cannot be
        sent."""
        call = Call(id=next(self._ids), request_id=request.request_id)
        try:
            data = request_frame(call.id, request)
        except WireError as error:
            raise RequestError(f"the request is too large for the engine: {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        assert self._transport is not None
        self._calls[call.id] = call
        self._transport.write(data)
        return call

    def hang_up(self, call: Call) -> None:
        """Nobody reads the call any more; the engine frees it before its next step."""
        if self._calls.pop(call.id, None) is not None:
            self.send(Abort(call.id))

    def end_calls(self, message: str) -> None:
        """Ends every open call with an `error` event that says `message`."""
        for call in self._calls.values():
            call.unread.put_nowait(error_event(call.request_id, message))
        self._calls.clear()

    def close(self) -> None:
        """Drops the connection; what is to be told to its calls has to be told before."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._hello.done():
            self._hello.set_result(None)
        self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            for call in self._calls.values():
                crashed = error_event(call.request_id, CRASHED) if call.is_taken else None
                call.unread.put_nowait(crashed)
            self._calls.clear()
            self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(decode_from_engine(body))
        except (WireError, msgspec.DecodeError):
            logger.exception("what the engine's process says makes no sense")
            self.close()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Step(events, stats):
                self.stats = stats
                for call_id, event in events:
                    self._deliver(call_id, event, is_last=event.finish_reason is not None)
                if stats.failure is not None:
                    self._lose()
            case Taken(call_id):
                if call_id in self._calls:
                    self._calls[call_id].is_taken = True
            case Refused(call_id, packed):
                self._refuse(call_id, unpack(packed))
            case Hello() | Failed():
                if not self._hello.done():
                    self._hello.set_result(message)

    def _refuse(self, call_id: int, error: Exception) -> None:
        if isinstance(error, EngineClosedError):  # it is about to say why
            self._deliver(call_id, None, is_last=True)
            self._lose()
        else:
            self._deliver(call_id, error, is_last=True)

    def _deliver(self, call_id: int, item: TokenEvent | Exception | None, *, is_last: bool) -> None:
        call = self._calls.pop(call_id, None) if is_last else self._calls.get(call_id)
        if call is not None:
            call.unread.put_nowait(item)


async def connect(sock: socket.socket, on_lost: Callable[[Line], None]) -> Line:
    """A line over a connected socket, which it takes over."""
    loop = asyncio.get_running_loop()
    line = Line(on_lost)
    await loop.create_unix_connection(lambda: line, sock=sock)
    return line
