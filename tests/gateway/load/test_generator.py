"""Arrivals that wait for nobody, in virtual time; each answer takes exactly as long as it says."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load.generator import HEAD_START_S, closed_loop, open_loop
from perilune.gateway.load.sample import OK, Sample
from perilune.gateway.load.workload import Block, Bounds, Load, Request, schedule


class SlowServer:
    """Answers `width` requests at a time, `service_s` each, in the order in which they came."""

    def __init__(self, loop, *, service_s: float, width: int = 1) -> None:
        self.loop = loop
        self.service_s = service_s
        self.prepare_s = 0.0
        self.most_in_flight = 0
        self._in_flight = 0
        self._room = asyncio.Semaphore(width)

    def prepare(self, request: Request) -> bytes:
        self.loop.now_s += self.prepare_s
        return b""

    async def send(self, body: bytes, sample: Sample) -> None:
        sample.sent_at = self.loop.time()
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        async with self._room:
            await asyncio.sleep(self.service_s)
        sample.saw_piece(self.loop.time())
        sample.saw_finish(self.loop.time())
        sample.status, sample.ended_at = OK, self.loop.time()
        self._in_flight -= 1


def even(rate: float, number: int):
    requests = [Request(0.0, (Block("x", 1),), 1)] * number
    return schedule(requests, Load(arrivals="constant", rate=rate), Bounds(), 0)


def test_a_slow_server_is_not_flattered(in_virtual_time):
    """Coordinated omission: one second of service, two arrivals a second. Request k waits for k
    others, which a client that waited itself would never see."""

    async def main(loop):
        server = SlowServer(loop, service_s=1.0)
        opened = await open_loop(even(2.0, 10), server, loop.time)
        most = server.most_in_flight
        closed = await closed_loop(
            even(2.0, 10), server, concurrency=1, seconds=None, clock=loop.time
        )
        return opened, most, closed

    opened, most, closed = in_virtual_time(main)
    expected = [(k + 1) * 1.0 - k * 0.5 for k in range(10)]
    assert [sample.e2e_s for sample in opened] == pytest.approx(expected)
    assert [sample.ttft_s for sample in opened] == pytest.approx(expected)
    assert most == 6
    assert [sample.e2e_s for sample in closed] == pytest.approx([1.0] * 10)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=30).map(sorted),
    st.floats(0, 20),
    st.integers(1, 3),
)
def test_every_request_is_sent_at_its_time_whatever_the_server_does(
    in_virtual_time, times, service_s, width
):
    requests = [Request(time, (Block("x", 1),), 1) for time in times]

    async def main(loop):
        start = loop.time() + HEAD_START_S
        server = SlowServer(loop, service_s=service_s, width=width)
        return start, await open_loop(requests, server, loop.time)

    start, samples = in_virtual_time(main)
    assert [sample.request for sample in samples] == requests
    assert [sample.due_at for sample in samples] == [start + time for time in times]
    assert all(0 <= sample.lag_s < 1e-8 for sample in samples)
    assert all(sample.e2e_s >= service_s - 1e-9 for sample in samples)


def test_what_the_generator_loses_counts_as_waiting_and_is_known(in_virtual_time):
    """Bodies of 0.3 s, ten arrivals a second: those made ahead of the start are on time."""

    async def main(loop):
        server = SlowServer(loop, service_s=0.0, width=1000)
        server.prepare_s = 0.3
        return await open_loop(even(10.0, 300), server, loop.time)

    samples = in_virtual_time(main)
    assert all(sample.lag_s < 1e-8 for sample in samples[:256])
    assert samples[-1].lag_s == pytest.approx(44 * (0.3 - 0.1), abs=0.2)
    assert all(sample.ttft_s >= sample.lag_s for sample in samples)


def test_a_closed_loop_keeps_its_number_in_flight(in_virtual_time):
    async def main(loop):
        server = SlowServer(loop, service_s=1.0, width=100)
        samples = await closed_loop(
            even(1.0, 20), server, concurrency=4, seconds=None, clock=loop.time
        )
        return server.most_in_flight, loop.time() - samples[0].due_at, len(samples)

    assert in_virtual_time(main) == (4, pytest.approx(5.0), 20)


def test_a_closed_loop_ends_with_its_time(in_virtual_time):
    async def main(loop):
        server = SlowServer(loop, service_s=1.0, width=100)
        return await closed_loop(
            even(1.0, 1000), server, concurrency=2, seconds=4.5, clock=loop.time
        )

    samples = in_virtual_time(main)
    assert len(samples) == 10
    assert all(sample.is_ok for sample in samples)


@pytest.mark.parametrize("closed", [False, True])
def test_cancelled_it_leaves_nothing_running(in_virtual_time, closed):
    async def main(loop):
        server = SlowServer(loop, service_s=100.0)
        if closed:
            running = closed_loop(
                even(5.0, 9), server, concurrency=3, seconds=None, clock=loop.time
            )
        else:
            running = open_loop(even(5.0, 9), server, loop.time)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 7.0)
        return len(asyncio.all_tasks())

    assert in_virtual_time(main) == 1
