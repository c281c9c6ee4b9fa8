"""Lengths and arrivals: what is sent, and when."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load.errors import WorkloadError
from perilune.gateway.load.traces import TracedRequest
from perilune.gateway.load.workload import (
    Block,
    Bounds,
    Fitting,
    Load,
    Request,
    fixed_lengths,
    scaled,
    schedule,
)

rates = st.floats(0.01, 100)


def requests_at(*times: float) -> list[Request]:
    return [Request(time, (Block("x", 1),), 1) for time in times]


def due(requests, load: Load, seed: int = 0, **bounds) -> list[float]:
    return [r.due_s for r in schedule(requests, load, Bounds(**bounds), seed)]


endless = scaled(fixed_lengths(10, 5), 1.0)


@given(rates, st.integers(0, 2**32), st.integers(1, 300))
def test_poisson_arrivals_rise_and_follow_from_the_seed(rate, seed, number):
    load = Load(arrivals="poisson", rate=rate)
    times = due(endless, load, seed, num_requests=number)
    assert len(times) == number
    assert times[0] > 0
    assert all(a <= b for a, b in pairwise(times))
    assert times == due(endless, load, seed, num_requests=number)
    assert times != due(endless, load, seed + 1, num_requests=number)


def test_poisson_gaps_are_exponential():
    times = due(endless, Load(arrivals="poisson", rate=5.0), num_requests=20_000)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.median(gaps) == pytest.approx(0.6931 / 5, rel=0.03)


@given(rates, st.floats(0.01, 20))
def test_constant_arrivals_within_the_seconds(rate, seconds):
    times = due(endless, Load(arrivals="constant", rate=rate), seconds=seconds)
    assert times == [number / rate for number in range(len(times))]
    assert times[-1] < seconds <= len(times) / rate


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=50).map(sorted), rates)
def test_a_trace_at_a_rate_keeps_its_bursts(times, rate):
    requests = requests_at(*times)
    load = Load(arrivals="trace", rate=rate)
    if times[0] == times[-1]:
        with pytest.raises(WorkloadError, match="come at once"):
            due(requests, load)
        return
    stretched = due(requests, load)
    assert len(stretched) == len(times)
    assert stretched[0] == 0.0
    assert stretched[-1] == pytest.approx((len(times) - 1) / rate)
    span = times[-1] - times[0]
    for (a, b), (new_a, new_b) in zip(pairwise(times), pairwise(stretched), strict=True):
        share = (new_b - new_a) / stretched[-1]
        assert share == pytest.approx((b - a) / span, abs=1e-9)


def test_a_trace_at_a_rate_takes_as_much_of_it_as_the_seconds_hold():
    requests = requests_at(*range(100, 200))
    times = due(requests, Load(arrivals="trace", rate=4.0), seconds=5.0)
    assert len(times) == 20
    assert times[-1] < 5.0


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50).map(sorted), rates)
def test_a_trace_at_a_speed(times, speed):
    assert due(requests_at(*times), Load(arrivals="trace", speed=speed)) == [
        (time - times[0]) / speed for time in times
    ]


def test_the_nearer_bound_ends_the_arrivals():
    load = Load(arrivals="constant", rate=1.0)
    assert len(due(endless, load, num_requests=3, seconds=100.0)) == 3
    assert len(due(endless, load, num_requests=300, seconds=5.0)) == 5


def test_arrivals_that_need_a_rate():
    with pytest.raises(WorkloadError, match="poisson arrivals need a rate"):
        due(endless, Load(arrivals="poisson"))


def test_a_single_request_of_a_trace_needs_no_rate():
    assert due(requests_at(7.0), Load(arrivals="trace", rate=3.0)) == [0.0]


blocks = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(st.lists(st.tuples(blocks, st.integers(1, 512)), min_size=1), st.floats(0.001, 2))
def test_scaled_prompts_share_what_the_trace_shares(prompts, factor):
    traced = [
        TracedRequest(0.0, (len(ids) - 1) * 512 + rest, 9, tuple(ids)) for ids, rest in prompts
    ]
    whole = max(1, round(512 * factor))
    for request, (ids, rest) in zip(scaled(traced, factor), prompts, strict=True):
        assert [block.key for block in request.blocks] == [f"b{block_id}" for block_id in ids]
        assert all(block.num_tokens == whole for block in request.blocks[:-1])
        assert request.blocks[-1].num_tokens == max(1, round(rest * factor))
        assert request.output_tokens == max(1, round(9 * factor))


def test_prompts_without_blocks_share_nothing():
    first, second = islice(scaled(fixed_lengths(100, 40), 0.5), 2)
    assert first.blocks[0].key != second.blocks[0].key
    assert first.prompt_tokens == second.prompt_tokens == 50
    assert first.output_tokens == 20


def test_requests_beyond_the_context_are_left_out_and_counted():
    requests = [Request(0.0, (Block("x", n),), 2) for n in (5, 9, 8, 100)]
    fitting = Fitting(requests, max_context=10)
    assert [request.prompt_tokens for request in fitting] == [5, 8]
    assert fitting.num_left_out == 2
    assert len(list(Fitting(requests, max_context=None))) == 4


def test_loads_in_words():
    assert str(Load(arrivals="closed", concurrency=4)) == "4 at a time"
    assert str(Load(arrivals="trace", speed=0.5)) == "trace at 0.5 times its speed"
    assert str(Load(arrivals="trace", rate=2.0)) == "trace at 2/s"
