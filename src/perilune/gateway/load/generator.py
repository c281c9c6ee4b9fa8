"""Sends requests on time, and keeps what became of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from perilune.gateway.load.sample import Sample
from perilune.gateway.load.workload import Request

HEAD_START_S = 0.05
"""From the last preparation to the first arrival."""

Clock = Callable[[], float]
"""Seconds from any start. The fast event loop's own clock counts milliseconds, and stands still
while a callback runs."""

_MAX_AHEAD = 256
_LEAST_SPARE_S = 0.02


class Sender(Protocol):
    def prepare(self, request: Request) -> bytes:
        """The body of a request; may take a while."""
        ...

    async def send(self, body: bytes, sample: Sample) -> None:
        """Sends it and fills in `sample`; raises nothing."""
        ...


async def open_loop(
    requests: Iterable[Request], sender: Sender, clock: Clock = time.perf_counter
) -> list[Sample]:
    """Each request at its time, whether or not answers have come; all samples, in that order.

    A generator that waited for answers would send less while the server is slow, and never meet the
    waiting that its users see (coordinated omission).
    """
    bodies = _Bodies(requests, sender, clock)
    await bodies.make_before(math.inf)
    start = clock() + HEAD_START_S
    samples: list[Sample] = []
    tasks: list[asyncio.Task[None]] = []
    while (item := bodies.next()) is not None:
        request, body = item
        due_at = start + request.due_s
        await bodies.make_before(due_at)
        while (delay_s := due_at - clock()) > 0:  # noqa: ASYNC110 (a time, of no event)
            await asyncio.sleep(delay_s)  # to the nearest millisecond
        samples.append(Sample(request=request, due_at=due_at))
        tasks.append(asyncio.create_task(sender.send(body, samples[-1])))
        await asyncio.sleep(0)  # it goes out before the next body is made
    await _all(tasks)
    return samples


async def closed_loop(
    requests: Iterable[Request],
    sender: Sender,
    *,
    concurrency: int,
    seconds: float | None,
    clock: Clock = time.perf_counter,
) -> list[Sample]:
    """`concurrency` requests at a time, a new one for each answer, until `requests` or the time
    ends; all samples, in the order of sending. A request is due when its turn comes."""
    waiting = iter(requests)
    end = math.inf if seconds is None else clock() + seconds
    samples: list[Sample] = []

    async def keep_asking() -> None:
        while clock() < end and (request := next(waiting, None)) is not None:
            body = sender.prepare(request)
            sample = Sample(request=request, due_at=clock())
            samples.append(sample)
            await sender.send(body, sample)

    await _all([asyncio.create_task(keep_asking()) for _ in range(concurrency)])
    return samples


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Waits for all; cancelled, or after a bug in one, it cancels the rest."""
    tasks = list(tasks)
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Bodies:
    """Bodies made ahead of their time: one of a long prompt takes milliseconds."""

    def __init__(self, requests: Iterable[Request], sender: Sender, clock: Clock) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self._sender = sender
        self._clock = clock
        self._ready: deque[tuple[Request, bytes]] = deque()
        self._spare_s = _LEAST_SPARE_S

    def next(self) -> tuple[Request, bytes] | None:
        if not self._ready:
            self._make_one()
        return self._ready.popleft() if self._ready else None

    async def make_before(self, due_at: float) -> None:
        """Makes bodies while there is room for them and twice the time that the slowest one took.

        Answers are read between one and the next.
        """
        while len(self._ready) < _MAX_AHEAD and self._clock() < due_at - self._spare_s:
            if not self._make_one():
                return
            await asyncio.sleep(0)

    def _make_one(self) -> bool:
        started_at = self._clock()
        request = next(self._requests, None)
        if request is None:
            return False
        self._ready.append((request, self._sender.prepare(request)))
        self._spare_s = max(self._spare_s, 2 * (self._clock() - started_at))
        return True
