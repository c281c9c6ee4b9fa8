"""How late the generator's own event loop is: what the clock of every answer may be off by."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

INTERVAL_S = 0.02


class Delay(NamedTuple):
    at: float
    """By the clock that the samples have."""
    delay_s: float


@asynccontextmanager
async def watched(every: Callable[[], None] = lambda: None) -> AsyncGenerator[list[Delay], None]:
    """Delays, gathered while the block runs; `every` is called about once a second."""
    delays: list[Delay] = []
    task = asyncio.create_task(_watch(delays, every))
    try:
        yield delays
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(delays: list[Delay], every: Callable[[], None]) -> None:
    called_at = time.perf_counter()
    while True:
        due_at = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        now = time.perf_counter()
        delays.append(Delay(now, max(0.0, now - due_at)))
        if now - called_at >= 1.0:
            called_at = now
            every()
