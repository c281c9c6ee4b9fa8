"""Keeps an engine process running: starts it, sees it die, starts the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from perilune.core.errors import EngineError, PeriluneError
from perilune.core.types import EngineInfo, EngineStats
from perilune.engine.errors import EngineClosedError, EngineRestartingError
from perilune.engine.launch import EngineProcess
from perilune.engine.line import Line, connect
from perilune.engine.restarts import Deaths, RestartPolicy
from perilune.engine.wire import VERSION, Close, Start

logger = logging.getLogger(__name__)

_REAP_S = 2.0
"""How long a process may take to end once its connection has."""


class Supervisor:
    """A `Link` to an engine in a process of its own.

    An engine that dies ends the calls that are open on it; calls that come later wait for the next
    one. Lives in one event loop, in which nothing of this blocks for longer than a fork.
    """

    def __init__(
        self,
        factory: str,
        *,
        policy: RestartPolicy | None = None,
        launch: Callable[[], EngineProcess] = EngineProcess,
        **options: Any,
    ) -> None:
        """`factory` is `module:function`; in the process it makes an `Opened` of `options`."""
        self.num_restarts = 0
        self._policy = policy or RestartPolicy()
        self._launch = launch
        self._start = Start(VERSION, factory, options)
        self._info: EngineInfo | None = None
        self._process: EngineProcess | None = None
        self._line: Line | None = None
        self._trouble: str | None = None
        """Why there is no line."""
        self._is_over = False
        """There is no line, and there will be none."""
        self._settled = asyncio.Event()
        """There is a line, or it is over."""
        self._lost = asyncio.Event()
        self._since_s = 0.0
        """When the engine that serves now was ready."""
        self._start_s = 0.0
        """How long the last start took."""
        self._expected_s = 0.0
        """When the next engine should be ready."""
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the engine can serve.

        Raises:
            PeriluneError, OSError, ModuleNotFoundError: what kept the engine from starting.
        """
        await self._begin()
        self._keeper = asyncio.create_task(self._keep())

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the process that serves now or is being started."""
        return None if self._process is None else self._process.pid

    def stats(self) -> EngineStats:
        stats = EngineStats() if self._line is None else self._line.stats
        return replace(stats, failure=self._trouble, restarts_total=self.num_restarts)

    async def line(self) -> Line:
        if not self._settled.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._policy.wait_s):
                    await self._settled.wait()
        if self._line is not None:
            return self._line
        trouble = self._trouble or "the engine has not been started"
        if self._is_over:
            raise EngineClosedError(trouble)
        left_s = self._expected_s - time.monotonic()
        raise EngineRestartingError(trouble, retry_after_s=max(1.0, left_s))

    async def close(self) -> None:
        """Ends the calls, the process and the supervision. May be called again."""
        line, self._line = self._line, None
        self._give_up("the engine is closed")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process, self._process = self._process, None
        if line is not None:
            line.end_calls("the engine is shutting down")
            line.send(Close())
        if process is not None:
            await process.ended(self._policy.close_s)
        if line is not None:
            line.close()

    async def _begin(self) -> None:
        """Starts a process and waits until it serves; if it does not, nothing of it is left."""
        began_s = time.monotonic()
        process = self._process = self._launch()
        line: Line | None = None
        try:
            line = await connect(process.sock, self._on_lost)
            line.send(self._start)
            self._check(await line.ready())
        except BaseException:
            process.sock.close() if line is None else line.close()
            process.kill()
            await process.ended(_REAP_S)
            self._process = None
            raise
        self._since_s = time.monotonic()
        self._start_s = self._since_s - began_s
        self._line, self._trouble = line, None
        self._settled.set()

    def _check(self, info: EngineInfo) -> None:
        """The gateway's tokenizer and limits were made for the first engine."""
        if self._info is not None and replace(info, details=self._info.details) != self._info:
            raise EngineError("the checkpoint has changed on disk: restart the server")
        self._info = info

    def _on_lost(self, line: Line) -> None:
        if line is self._line:  # at once: no call may start on it any more
            self._line = None
            self._trouble = "the engine has crashed and is being started again"
            self._expected_s = time.monotonic() + self._start_s
            self._settled.clear()
            self._lost.set()

    async def _keep(self) -> None:
        deaths = Deaths(self._policy)
        try:
            while not self._is_over:
                await self._lost.wait()
                self._lost.clear()
                assert self._process is not None
                lived_s = time.monotonic() - self._since_s
                how: str | None = f"the engine's process {await self._process.ended(_REAP_S)}"
                while how is not None:
                    how = await self._restart(deaths, lived_s, how)
                    lived_s = 0.0
        except Exception:
            # Calls that come later wait for what this task does.
            logger.critical("nobody starts the engine again", exc_info=True)
            self._give_up("the engine has crashed and cannot be started again")

    async def _restart(self, deaths: Deaths, lived_s: float, how: str) -> str | None:
        """Starts the next engine, or gives up; says how it failed if that is to be tried again."""
        delay_s = deaths.delay_after(lived_s)
        if delay_s is None:
            self._give_up(
                f"the engine has crashed {deaths.num_quick} times in a row and is not started "
                f"again ({how}); restart the server, its log has the reason"
            )
            logger.critical(self._trouble)
            return None
        logger.error("%s; it is started again in %.1f s", how, delay_s)
        self._expected_s = time.monotonic() + delay_s + self._start_s
        await asyncio.sleep(delay_s)
        self.num_restarts += 1
        try:
            await self._begin()
        except (PeriluneError, OSError, ModuleNotFoundError) as error:
            return f"the engine could not be started: {error}"
        return None

    def _give_up(self, why: str) -> None:
        self._trouble, self._is_over = why, True
        self._settled.set()
