"""Pages and slots: who holds which, how often."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, EngineError
from perilune.engine.errors import PoolFullError
from perilune.engine.pages import PagePool
from perilune.engine.slots import SlotPool


def test_page_0_is_never_handed_out():
    pool = PagePool(4)
    assert pool.capacity == pool.num_free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="page 0 is not in use"):
        pool.share([0])


def test_every_slot_is_handed_out():
    assert sorted(SlotPool(3).allocate(3)) == [0, 1, 2]


def test_a_full_pool_says_so_and_gives_nothing():
    pool = SlotPool(3)
    pool.allocate(2)
    with pytest.raises(PoolFullError, match="2 slots of the cache are wanted and 1 are free") as e:
        pool.allocate(2)
    assert (e.value.kind, e.value.wanted, e.value.free) == ("slot", 2, 1)
    assert isinstance(e.value, EngineError)
    assert e.value.status == 503
    assert pool.num_free == 1


@pytest.mark.parametrize(("pool", "size"), [(PagePool, 1), (SlotPool, 0)])
def test_a_pool_of_nothing_is_refused(pool, size):
    with pytest.raises(ConfigError, match="a pool needs more than"):
        pool(size)


def test_the_last_reference_frees():
    freed = []
    pool = SlotPool(2, on_free=freed.extend)
    [slot] = pool.allocate(1)
    pool.share([slot, slot])
    pool.release([slot, slot])
    assert (pool.count(slot), freed) == (1, [])
    pool.release([slot])
    assert (pool.count(slot), freed, pool.num_free) == (0, [slot], 2)


@pytest.mark.parametrize("call", ["share", "release", "check_used"])
@pytest.mark.parametrize("number", [-1, 1, 99])
def test_what_is_not_in_use_cannot_be_used(call, number):
    pool = SlotPool(2)
    assert pool.allocate(1) == [0]
    with pytest.raises((ValueError, IndexError)):
        getattr(pool, call)([number])
    assert pool.count(0) == 1
    pool.check({0: 1})


def test_a_freed_number_comes_back_first():
    pool = SlotPool(8)
    taken = pool.allocate(5)
    pool.release([taken[2]])
    assert pool.allocate(1) == [taken[2]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 6)),
        st.tuples(st.sampled_from(["share", "release"]), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_counts_agree_with_a_counter(steps):
    pool, held = PagePool(8), Counter()
    for call, number in steps:
        if call == "allocate":
            if number > pool.num_free:
                with pytest.raises(PoolFullError):
                    pool.allocate(number)
            else:
                held.update(pool.allocate(number))
        elif held[number]:
            getattr(pool, call)([number])
            held[number] += 1 if call == "share" else -1
        pool.check(held)
    assert pool.num_used == len(+held)
    assert pool.num_used + pool.num_free == pool.capacity


@pytest.mark.parametrize("extra", [{1: 1}, {1: 2, 2: 1}, {}])
def test_check_notices_a_leak(extra):
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check(extra)
