"""Merging event streams: order, errors, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.gateway.fanout import merge


class Source:
    """A stream that notes when it is closed."""

    def __init__(self, items: list, *, then: Exception | None = None, hangs: bool = False) -> None:
        self.items, self.then, self.hangs = items, then, hangs
        self.closed = False
        self.waits = asyncio.Event()

    async def events(self) -> AsyncIterator:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.then is not None:
                raise self.then
            if self.hangs:
                self.waits.set()
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def collect(sources: list[Source]) -> list[tuple]:
    return [item async for item in merge([source.events() for source in sources])]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(), max_size=5), min_size=1, max_size=5))
def test_every_stream_comes_out_complete_and_in_order(lists):
    sources = [Source(items) for items in lists]
    merged = asyncio.run(collect(sources))
    assert [[e for i, e in merged if i == index] for index in range(len(lists))] == lists
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_others", [0, 2])
def test_an_error_is_raised_and_closes_the_others(num_others):
    sources = [Source([1], then=ValueError("broken"))]
    sources += [Source([2], hangs=True) for _ in range(num_others)]
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect(sources))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_closing_early_closes_every_stream(num_streams):
    async def take_one(sources):
        merged = merge([source.events() for source in sources])
        first = await anext(merged)
        await merged.aclose()
        return first

    sources = [Source([7, 8], hangs=True) for _ in range(num_streams)]
    assert asyncio.run(take_one(sources))[1] == 7
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_cancelling_the_reader_closes_every_stream(num_streams):
    async def cancel(sources):
        reader = asyncio.create_task(collect(sources))
        for source in sources:
            await source.waits.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        return reader.cancelled()

    sources = [Source([0], hangs=True) for _ in range(num_streams)]
    assert asyncio.run(cancel(sources))
    assert all(source.closed for source in sources)
