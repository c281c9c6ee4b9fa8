"""Server-sent events: one event a chunk, pings while nothing comes, errors as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from perilune.gateway.errors import error_body
from perilune.gateway.fanout import closing
from perilune.gateway.rsgi import HeaderList, HttpProtocol, HttpStream, ProtocolClosed

DONE = b"[DONE]"
PING = b": ping\n\n"
HEADERS = [
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),  # nginx would hold the events back
]


async def send_stream(
    proto: HttpProtocol,
    chunks: AsyncIterator[bytes],
    headers: HeaderList,
    *,
    ping_interval_s: float,
    on_fault: Callable[[Exception], None],
) -> None:
    """Sends every chunk as an event, then `[DONE]`.

    The response starts with the first chunk or, when that takes longer than `ping_interval_s`, with
    a ping: proxies cut a connection that is silent for long. An error before the start is raised,
    so that it can become an HTTP status. A later one goes to `on_fault` and becomes an event with
    an `error` object; the stream ends without `[DONE]`, so that no client takes it for complete.
    """
    async with closing(chunks), _fetching(chunks) as first:
        await asyncio.wait({first}, timeout=ping_interval_s)
        chunk = first.result() if first.done() else None
        events = _Events(proto.response_stream(200, [*HEADERS, *headers]), ping_interval_s)
        pings = asyncio.create_task(events.ping_while_silent())
        try:
            if chunk is None:
                await events.ping()
                chunk = await first
            await events.send(chunk)
            async for chunk in chunks:
                await events.send(chunk)
            await events.send(DONE)
        except ProtocolClosed:
            raise
        except Exception as error:  # the status line is gone: the client must read it here
            on_fault(error)
            await events.send(error_body(error))
        finally:
            pings.cancel()
            events.end()


class _Events:
    """The open stream of one response."""

    def __init__(self, transport: HttpStream, ping_interval_s: float) -> None:
        self._transport = transport
        self._ping_interval_s = ping_interval_s
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()

    async def send(self, data: bytes) -> None:
        self._sent_at = self._clock()
        await self._transport.send_bytes(b"data: %b\n\n" % data)

    async def ping(self) -> None:
        self._sent_at = self._clock()
        await self._transport.send_bytes(PING)

    def end(self) -> None:
        """Ends the response: the server does so when the last reference to its stream goes.

        An error's traceback, kept by whoever has logged it, would hold the client's connection.
        """
        del self._transport

    async def ping_while_silent(self) -> None:
        # Without a client the task that sends chunks is told the same, and ends the request.
        with suppress(ProtocolClosed):
            while True:
                silent_s = self._clock() - self._sent_at
                if silent_s >= self._ping_interval_s:
                    await self.ping()
                else:
                    await asyncio.sleep(self._ping_interval_s - silent_s)


@asynccontextmanager
async def _fetching(chunks: AsyncIterator[bytes]) -> AsyncIterator[asyncio.Task[bytes]]:
    """The first chunk as a task, so that waiting for it can have a limit."""

    async def fetch() -> bytes:
        return await anext(chunks)

    task = asyncio.create_task(fetch())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
