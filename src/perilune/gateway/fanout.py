"""Several event streams as one: the choices of an answer run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Closes `iterator` at the end, which aborts what it stands for, also after a `break`."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yields (index of the stream, event) as events come.

    The first error of any stream is raised, and the others are closed. Closing this iterator
    closes them all.
    """
    if len(streams) == 1:
        async with closing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    waiting = {_fetch(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, event = waiting[task], task.result()
                del waiting[task]
                if event is not None:
                    waiting[_fetch(streams[index])] = index
                    yield index, event
    finally:
        await _cancel(waiting)
        for stream in streams:
            async with closing(stream):
                pass


def _fetch(stream: AsyncIterator[T]) -> asyncio.Task[T | None]:
    """The next event of `stream`, None at its end."""

    async def fetch() -> T | None:
        return await anext(stream, None)

    return asyncio.create_task(fetch())


async def _cancel(tasks: Collection[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
