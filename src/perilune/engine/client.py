"""The engine's door for asyncio: token requests in, token events out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.errors import error_event
from perilune.engine.line import CRASHED, Line


class Link(Protocol):
    """The way to an engine: `Supervisor` to one in a process, `EngineThread` to one in a thread."""

    @property
    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats: ...

    async def line(self) -> Line:
        """The connection to the engine that serves now.

        Raises:
            EngineClosedError: there is none, and there will be none.
            EngineRestartingError: there is none yet.
        """
        ...

    async def close(self) -> None: ...


class EngineClient:
    """An `Engine` (see `core.protocols`) at the other end of a link. For one event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def info(self) -> EngineInfo:
        return self._link.info

    def stats(self) -> EngineStats:
        """As the engine stood after its last step or call; it is not asked."""
        return self._link.stats()

    async def generate(self, request: TokenRequest) -> AsyncIterator[TokenEvent]:
        """As `Engine.generate`. A request that is under way when the engine dies ends with an
        `error` event and is not tried again: it may be what killed it. One that the engine had
        not taken up goes to the next engine, once.

        Raises EngineClosedError or EngineRestartingError, too, when no engine can take it.
        """
        for _ in range(2):
            line = await self._link.line()
            call = line.call(request)
            try:
                while (event := await call.next()) is not None:
                    yield event
                    if event.finish_reason is not None:
                        return
            finally:
                line.hang_up(call)
        yield error_event(request.request_id, CRASHED)

    async def close(self) -> None:
        """As `Engine.close`; the answers do not wait for a step that is still running."""
        await self._link.close()
