"""The prefix cache, case by case. The state machine beside it mixes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from perilune.engine.cost_model import CostModel
from perilune.engine.hit import Hit
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.slots import SlotPool

P = 4
COST = CostModel(token_flops=1.0, pair_flops=0.0, row_bytes=1, state_bytes=8)


@dataclass
class Bench:
    """A cache, and sequences that hold what they have allocated."""

    pages: PagePool = field(default_factory=lambda: PagePool(64))
    slots: SlotPool = field(default_factory=lambda: SlotPool(16))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(
            self.pages, self.slots, page_len=P, cost=COST, clock=lambda: self.now
        )

    def table(self, tokens: list[int], hit: Hit | None = None) -> list[int]:
        shared = list(hit.pages) if hit else []
        return shared + self.pages.allocate(-(-len(tokens) // P) - len(shared))

    def put(self, tokens: list[int], *counts: int) -> list[int]:
        """A sequence that computes `tokens`, publishes at `counts` and ends; its page table."""
        table = self.table(tokens)
        for count in counts or (len(tokens),):
            self.cache.publish(tokens, count, table, self.slots.allocate(1)[0])
        self.pages.release(table)
        self.cache.check()
        return table

    def length(self, tokens: list[int]) -> int:
        """Of the hit."""
        hit = self.cache.lookup(tokens)
        assert hit.num_tokens == self.cache.peek(tokens)
        self.cache.drop(hit)
        return hit.num_tokens


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_miss_names_nothing(bench):
    hit = bench.cache.lookup([1, 2, 3])
    assert (hit.num_tokens, hit.pages, hit.partial_page, hit.slot) == (0, (), None, None)
    assert hit.branch_points == ()
    bench.cache.settle(hit)
    bench.cache.check()


def test_a_hit_ends_where_a_state_was_kept(bench):
    table = bench.put([*range(10)], 3, 9)
    hit = bench.cache.lookup([*range(10)])
    assert (hit.num_tokens, hit.pages, hit.partial_page) == (9, tuple(table[:2]), table[2])
    bench.cache.drop(hit)
    hit = bench.cache.lookup([*range(8)])
    assert (hit.num_tokens, hit.pages, hit.partial_page) == (3, (), table[0])
    assert hit.branch_points == (7,)
    bench.cache.drop(hit)


def test_a_hit_that_ends_with_a_page_copies_none(bench):
    table = bench.put([*range(8)])
    hit = bench.cache.lookup([*range(9)])
    assert (hit.num_tokens, hit.pages, hit.partial_page) == (8, tuple(table), None)
    bench.cache.drop(hit)


def test_one_token_is_left_to_compute(bench):
    """E12: a state cannot be cut back, not by one token either."""
    bench.put([*range(10)], 4, 10)
    assert bench.length([*range(11)]) == 10
    assert bench.length([*range(10)]) == 4
    assert bench.length([*range(4)]) == 0


def test_a_chunk_that_ends_inside_a_page_publishes_what_it_computed_and_no_more(bench):
    """E2: a prompt of 10 tokens is computed up to 6; a second request comes before the rest is."""
    tokens = [*range(10)]
    table = bench.table(tokens)
    bench.cache.publish(tokens, 6, table, bench.slots.allocate(1)[0])
    hit = bench.cache.lookup(tokens)
    assert (hit.num_tokens, hit.pages, hit.partial_page) == (6, (table[0],), table[1])
    bench.cache.drop(hit)
    bench.cache.publish(tokens, 10, table, bench.slots.allocate(1)[0])
    assert bench.length([*tokens, 99]) == 10


def test_rows_without_their_state_are_no_hit(bench):
    """E3: of a shared prefix only the state is evicted, its rows stay: one length for both."""
    shared = [*range(8)]
    bench.put(shared)
    bench.put([*shared, 50, 51, 52], 11)
    bench.put([*shared, 60, 61, 62], 11)
    [long] = [bench.cache.lookup([*shared, 50, 51, 52, 53])]
    [pinned] = [bench.cache.lookup([*shared, 60, 61, 62, 63])]
    assert bench.cache.evict(0, 1).num_slots == 1
    bench.cache.drop(long)
    bench.cache.drop(pinned)
    hit = bench.cache.lookup([*shared, 70, 71])
    assert (hit.num_tokens, hit.pages, hit.partial_page, hit.slot) == (0, (), None, None)
    assert hit.branch_points == (8,)
    bench.cache.drop(hit)
    assert bench.length([*shared, 50, 51, 52, 53]) == 11
    bench.put([*shared, 70, 71], 8)
    assert bench.length([*shared, 70, 71]) == 8


@pytest.mark.parametrize(
    ("num_tokens", "table", "slot"),
    [(4, [0], 0), (4, [2], 0), (4, [1], 1), (5, [1], 0), (0, [1], 0), (9, [1, 1, 1], 0)],
)
def test_scratch_and_unwritten_memory_is_not_published(bench, num_tokens, table, slot):
    """E4: page 0, a page or a slot that nobody has allocated, rows that no page holds."""
    assert (bench.pages.allocate(1), bench.slots.allocate(1)) == ([1], [0])
    with pytest.raises(ValueError, match=r"not in use|tokens to publish"):
        bench.cache.publish([*range(8)], num_tokens, table, slot)
    bench.cache.check({1: 1}, {0: 1})
    assert bench.length([*range(9)]) == 0


def test_the_second_of_two_equal_states_is_freed(bench):
    tokens = [*range(6)]
    first = bench.put(tokens)
    free = bench.pages.num_free, bench.slots.num_free
    table = bench.table(tokens)
    published = bench.cache.publish(tokens, 6, table, bench.slots.allocate(1)[0])
    assert published == (0, False)
    bench.pages.release(table)
    assert (bench.pages.num_free, bench.slots.num_free) == free
    hit = bench.cache.lookup([*tokens, 9])
    assert (*hit.pages, hit.partial_page) == tuple(first)
    bench.cache.drop(hit)


def test_what_is_new_is_counted(bench):
    bench.put([*range(6)])
    table = bench.table([*range(9)])
    published = bench.cache.publish([*range(9)], 9, table, bench.slots.allocate(1)[0])
    assert published == (3, True)


def test_a_branch_inside_a_page_has_its_own_copy_of_it(bench):
    """Tokens 0-5 are shared; page 1 holds 4 and 5, and then what each of the two goes on with."""
    left = bench.put([0, 1, 2, 3, 4, 5, 10, 11], 7)
    hit = bench.cache.lookup([0, 1, 2, 3, 4, 5, 20, 21])
    assert (hit.num_tokens, hit.branch_points) == (0, (6,))
    bench.cache.drop(hit)
    right = bench.put([0, 1, 2, 3, 4, 5, 20, 21], 6, 7)
    for last, table in ((10, [left[0], left[1]]), (20, [left[0], right[1]])):
        hit = bench.cache.lookup([0, 1, 2, 3, 4, 5, last, 99])
        assert (hit.num_tokens, [*hit.pages, hit.partial_page]) == (7, table)
        bench.cache.drop(hit)
    assert bench.pages.count(left[1]) == 2  # of the shared node and of the left one
    assert bench.pages.count(right[0]) == 0  # known already


def test_the_writer_goes_on_behind_what_it_has_published(bench):
    tokens = [*range(12)]
    table = bench.table(tokens)
    for count in (2, 3, 7, 12):
        bench.cache.publish(tokens, count, table, bench.slots.allocate(1)[0])
    assert [bench.pages.count(page) for page in table] == [4, 3, 2]
    bench.cache.check(dict.fromkeys(table, 1))
    for count in (2, 3, 7, 12):
        assert bench.length([*range(count), 99]) == count


def test_forks_without_a_state_are_told_as_well(bench):
    bench.put([1, 2, 3, 4, 5, 6, 7])
    bench.put([1, 2, 3, 8, 8, 8, 8])  # leaves after 3, where no state is
    bench.put([1, 2, 3, 4, 5, 9, 9])  # after 5
    hit = bench.cache.lookup([1, 2, 3, 4, 5, 6, 0])
    assert (hit.num_tokens, hit.branch_points) == (0, (3, 5, 6))
    bench.cache.drop(hit)


def test_what_a_hit_names_outlives_its_eviction(bench):
    tokens = [*range(6)]
    table = bench.put(tokens)
    hit = bench.cache.lookup([*tokens, 9])
    assert bench.cache.evict(64, 16) == (0, 0)
    bench.cache.clear()
    assert bench.length([*tokens, 9]) == 0
    assert all(bench.pages.count(page) == 1 for page in table)
    assert bench.slots.count(hit.slot) == 1
    bench.cache.settle(hit)
    bench.cache.check({table[0]: 1})
    bench.pages.release(hit.pages)
    with pytest.raises(KeyError):
        bench.cache.drop(hit)


def test_what_a_sequence_still_uses_is_not_evicted_for_its_pages(bench):
    """It would not be freed, and would have to be computed again."""
    tokens = [*range(6)]
    table = bench.table(tokens)
    bench.cache.publish(tokens, 6, table, bench.slots.allocate(1)[0])
    assert bench.cache.evict(1, 0) == (0, 0)
    assert bench.length([*tokens, 9]) == 6
    bench.pages.release(table)
    assert bench.cache.evict(1, 0) == (2, 1)


def test_a_leaf_takes_with_it_what_served_it_alone(bench):
    bench.put([1, 2, 3, 4, 5, 6, 7, 8, 9], 9)
    bench.put([1, 2, 3, 4, 5, 6, 7, 8, 0], 9)  # splits the edge after 8, without a state there
    assert bench.cache.evict(64, 0) == (4, 2)
    assert bench.pages.num_used == bench.slots.num_used == 0


def test_make_room_evicts_what_is_missing_and_no_more():
    bench = Bench(PagePool(9), SlotPool(4))
    bench.put([*range(8)])
    bench.put([*range(100, 108)])
    assert bench.cache.make_room(4, 1)
    assert bench.length([*range(9)]) == 8
    assert bench.cache.make_room(5, 1)
    assert bench.length([*range(9)]) == 0
    assert bench.length([*range(100, 109)]) == 8
    assert not bench.cache.make_room(9, 0)
    assert bench.cache.make_room(8, 4)


def test_a_pin_outlasts_others_and_then_ends(bench):
    first, second = [*range(8)], [*range(100, 108)]
    bench.put(first)
    bench.put(second)
    assert bench.cache.pin([*first, 9], ttl_s=10) == (8, 10)
    assert bench.cache.pin([*first, 9], ttl_s=5) == (8, 10)
    bench.cache.evict(64, 16)
    assert bench.length([*first, 9]) == 8
    assert bench.length([*second, 9]) == 0
    bench.now = 11
    bench.cache.evict(64, 16)
    assert bench.length([*first, 9]) == 0
    assert bench.cache.pin([*first, 9], ttl_s=5) is None


def test_pins_leave_half_of_a_pool():
    bench = Bench(PagePool(9), SlotPool(4))
    for start in (0, 100, 200):
        bench.put([*range(start, start + 8)])
    assert bench.cache.pin([*range(8)], 10) == (8, 10)
    assert bench.cache.pin([*range(100, 108)], 10) == (8, 10)
    assert bench.cache.pin([*range(200, 208)], 10) is None
    bench.now = 11
    assert bench.cache.pin([*range(200, 208)], 10) == (8, 21)


def test_tokens_may_come_as_an_array(bench):
    bench.put(np.arange(10, dtype=np.int32))
    assert bench.length(np.arange(11)) == bench.length(tuple(range(11))) == 10


def test_the_callers_array_may_change_afterwards(bench):
    tokens = np.arange(10, dtype=np.int32)
    bench.put(tokens)
    tokens[:] = 0
    assert bench.length([*range(11)]) == 10
