"""Percentiles against their definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load.percentiles import nearest_rank, percentiles

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(values, st.integers(1, 100))
def test_the_smallest_value_that_so_many_do_not_exceed(numbers, percent):
    found = nearest_rank(sorted(numbers), percent)
    assert found in numbers
    needed = math.ceil(len(numbers) * percent / 100)
    assert sum(number <= found for number in numbers) >= needed
    assert sum(number < found for number in numbers) < needed


@given(values, st.randoms())
def test_order_does_not_matter_and_percentiles_rise(numbers, random):
    found = percentiles(numbers)
    shuffled = random.sample(numbers, len(numbers))
    assert percentiles(shuffled) == found
    assert found.p50 <= found.p90 <= found.p95 <= found.p99 <= found.max
    assert min(numbers) <= found.p50
    assert found.num == len(numbers)
    assert found.mean == pytest.approx(sum(numbers) / len(numbers), abs=1e-6)


def test_a_hundred_values():
    found = percentiles(range(1, 101))
    assert (found.p50, found.p90, found.p95, found.p99, found.max) == (50, 90, 95, 99, 100)


def test_what_is_not_there_does_not_count():
    assert percentiles([None, 2.0, None]).num == 1
    assert percentiles([None]) is None
