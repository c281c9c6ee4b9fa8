"""An engine in a thread of this process: for scripts, and for tests that look into it."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace

from perilune.core.types import EngineInfo, EngineStats
from perilune.engine.channel import Channel
from perilune.engine.errors import EngineClosedError
from perilune.engine.host import FAILURE, EngineHost, Opened
from perilune.engine.line import Line, connect


class EngineThread:
    """A `Link`. A fault that ends the engine is final, a crash is one of the whole process."""

    def __init__(self, opened: Opened) -> None:
        """Takes the core over and starts stepping it."""
        self._opened = opened
        self._closed = False
        self._connecting = asyncio.Lock()
        self._line: Line | None = None
        self._failed = False
        self._sock, theirs = socket.socketpair()
        self._channel = Channel(theirs)
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._opened.info

    def stats(self) -> EngineStats:
        stats = EngineStats() if self._line is None else self._line.stats
        return replace(stats, failure=FAILURE) if self._failed else stats

    async def line(self) -> Line:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        async with self._connecting:
            if self._line is None:
                self._line = await connect(self._sock, self._on_lost)
        if self._failed:
            raise EngineClosedError(FAILURE)
        return self._line

    async def close(self) -> None:
        self._closed = True
        if self._line is None:
            self._sock.close()
        else:
            self._line.end_calls("the engine is shutting down")
            self._line.close()
        await asyncio.to_thread(self._thread.join)

    def _on_lost(self, line: Line) -> None:
        self._failed = not self._closed

    def _run(self) -> None:
        try:
            EngineHost(self._channel, self._opened).run()
        finally:
            self._channel.close()
