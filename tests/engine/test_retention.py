"""Where a prompt's states are kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.engine.retention import Cut, Retention, cuts, cuts_within

ENDS = Retention()


def counts(*args, **options) -> list[int]:
    return [cut.num_tokens for cut in cuts(*args, **options)]


def test_a_prompts_end_is_one_token_early():
    assert cuts(10, 0, (), ENDS) == [Cut(9, "end")]


@pytest.mark.parametrize(("prompt_len", "hit_len"), [(1, 0), (10, 9), (10, 10)])
def test_there_is_nothing_new_to_keep(prompt_len, hit_len):
    assert cuts(prompt_len, hit_len, (), ENDS) == []


def test_each_kind_is_kept_for_its_reason():
    retention = Retention(interval=40, align=16)
    assert cuts(100, 0, (30,), retention, marks=(70,)) == [
        Cut(30, "branch"),
        Cut(40, "interval"),
        Cut(70, "mark"),
        Cut(80, "interval"),
        Cut(96, "aligned"),
        Cut(99, "end"),
    ]


def test_what_the_hit_covers_is_not_kept_again():
    assert counts(100, 50, (30, 60), Retention(interval=25), marks=(50, 20)) == [60, 75, 99]


def test_close_ones_give_way_to_those_of_higher_rank():
    retention = Retention(interval=10, min_gap=8)
    assert counts(50, 0, (33,), retention) == [10, 20, 33, 49]


def test_the_aligned_one_may_be_near_to_the_end_and_nothing_else():
    retention = Retention(align=16, min_gap=8)
    assert counts(100, 0, (95,), retention) == [96, 99]
    assert counts(100, 90, (), retention) == [99]


def test_the_cap_keeps_ends_first_and_spreads_the_rest():
    retention = Retention(interval=10, max_cuts=4)
    assert counts(100, 0, (55,), retention) == [40, 55, 90, 99]
    assert counts(100, 0, (55, 44, 33, 22), retention) == [33, 44, 55, 99]


@pytest.mark.parametrize("field", ["interval", "align", "min_gap", "max_cuts"])
def test_impossible_numbers_are_refused(field):
    with pytest.raises(ConfigError, match=field):
        Retention(**{field: -1})


NUMBERS = st.lists(st.integers(-5, 400), max_size=6)


@given(
    st.integers(1, 300),
    st.integers(0, 300),
    NUMBERS,
    NUMBERS,
    st.builds(
        Retention,
        interval=st.integers(0, 60),
        align=st.integers(0, 40),
        min_gap=st.integers(1, 30),
        max_cuts=st.integers(1, 9),
    ),
)
def test_cuts_are_what_the_kernels_take(prompt_len, hit_len, points, marks, retention):
    found = counts(prompt_len, hit_len, points, retention, marks)
    assert found == sorted(set(found))
    assert all(hit_len < count < prompt_len for count in found)
    assert len(found) <= retention.max_cuts
    aligned = retention.align and (prompt_len - 1) // retention.align * retention.align
    apart = found[:-1] if aligned in found else found
    assert all(b - a >= retention.min_gap for a, b in pairwise(apart))
    assert not found or found[-1] == prompt_len - 1


def test_the_cuts_of_a_chunk_are_counted_from_its_start():
    at = cuts(100, 0, (30, 60), ENDS)
    assert [cuts_within(at, *chunk) for chunk in ((0, 30), (30, 60), (60, 99), (99, 100))] == [
        (30,),
        (30,),
        (39,),
        (),
    ]
