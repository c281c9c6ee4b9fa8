"""The prefix cache under random schedules, against a model of it in plain sets.

Every row and state in memory tells the prefix that made it, and freed memory is poisoned: a hit
that names a wrong page, row or state is seen when it is used. With a planted fault the machine
fails.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from perilune.engine.cache_files import CacheFiles
from perilune.engine.cached_tree import CachedTree
from perilune.engine.cost_model import CostModel
from perilune.engine.disk_tier import DiskTier
from perilune.engine.errors import PoolFullError
from perilune.engine.fake_card_memory import ArrayMemory, LateExecutor, tags
from perilune.engine.hit import Held, Hit
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.prefix_use import Written
from perilune.engine.slots import SlotPool

P = 4
NUM_PAGES, NUM_SLOTS = 20, 8
COST = CostModel(token_flops=1.0, pair_flops=0.1, row_bytes=8, state_bytes=24)
NOBODY = 9
"""A token that no prompt holds."""
STEMS = [
    [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0],
    [0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1],  # leaves the first one inside of a page
    [1, 0, 0, 1, 1, 0, 1, 0],
]
PROMPTS = st.builds(
    lambda stem, count, tail: stem[:count] + tail,
    st.sampled_from(STEMS),
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    table: list[int]
    slot: int
    num_computed: int
    written: Written = field(default_factory=Written)


@dataclass(eq=False)
class Lookup:
    tokens: list[int]
    hit: Hit


@dataclass
class Pinned:
    tokens: tuple[int, ...]
    until_s: float


class PrefixMachine(RuleBasedStateMachine):
    """Plays the scheduler, and knows which prefixes the card must hold."""

    lookups = Bundle("lookups")
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.memory = ArrayMemory(NUM_PAGES, NUM_SLOTS, P)
        self.pages = PagePool(NUM_PAGES, on_free=self.memory.free_pages)
        self.slots = SlotPool(NUM_SLOTS, on_free=self.memory.free_slots)
        self.folder = Path(tempfile.mkdtemp())
        self.thread = LateExecutor()
        self.cache = self.new_cache(self.off_card())
        self.cached: set[tuple[int, ...]] = set()
        """Prefixes with a state on the card."""
        self.running: dict[Sequence, None] = {}
        self.open: dict[Lookup, None] = {}
        self.pins: list[Pinned] = []

    def off_card(self) -> OffCard | None:
        return None

    def new_cache(self, off_card: OffCard | None) -> PrefixCache:
        return PrefixCache(
            self.pages,
            self.slots,
            page_len=P,
            cost=COST,
            off_card=off_card,
            clock=lambda: self.now,
        )

    # What a scheduler does; planted faults override it.

    def table_of(self, hit: Hit, num_tokens: int) -> list[int]:
        fresh = self.pages.allocate(-(-num_tokens // P) - len(hit.pages))
        if hit.partial_page is not None:
            self.memory.row_PB[fresh[0], : hit.num_tokens % P] = self.memory.row_PB[
                hit.partial_page, : hit.num_tokens % P
            ]
        return [*hit.pages, *fresh]

    def published_count(self, sequence: Sequence, count: int) -> int:
        return count

    # Rules.

    @rule(target=lookups, tokens=PROMPTS)
    def look_up(self, tokens: list[int]) -> Lookup:
        found = Lookup(tokens, self.cache.lookup(tokens))
        self.open[found] = None
        known = [n for n in range(len(tokens)) if tuple(tokens[:n]) in self.cached]
        assert found.hit.num_tokens == max(known, default=0)
        points = found.hit.branch_points
        assert list(points) == sorted(points)
        assert all(found.hit.num_tokens < point < len(tokens) for point in points)
        return found

    @rule(found=consumes(lookups))
    def drop(self, found: Lookup) -> None:
        self.cache.drop(found.hit)
        del self.open[found]

    @rule(target=sequences, found=consumes(lookups), count=st.integers(0, 20))
    def start(self, found: Lookup, count: int) -> object:
        """The sequence runs, if there is room for it, and computes so many tokens."""
        del self.open[found]
        hit, tokens = found.hit, found.tokens
        if not self.make_room(-(-len(tokens) // P) - len(hit.pages), 1):
            self.cache.drop(hit)
            return multiple()
        table, [slot] = self.table_of(hit, len(tokens)), self.slots.allocate(1)
        self.memory.keep([], slot)
        if hit.slot is not None:
            self.memory.state_S[slot] = self.memory.state_S[hit.slot]
        self.cache.settle(hit)
        sequence = Sequence(list(tokens), table, slot, hit.num_tokens)
        self.running[sequence] = None
        self.expect_right(sequence)
        self.compute(sequence, count)
        return sequence

    @rule(tokens=PROMPTS, cuts=st.lists(st.integers(1, 20), max_size=3))
    def serve(self, tokens: list[int], cuts: list[int]) -> None:
        """A request from its prompt to its end, with states kept on the way."""
        sequence = self.start(self.look_up(tokens), 99)
        if isinstance(sequence, Sequence):
            for count in sorted(cuts):
                self.publish(sequence, count)
            self.end(sequence, True)

    @rule(sequence=sequences, count=st.integers(1, 9))
    def compute(self, sequence: Sequence, count: int) -> None:
        end = min(sequence.num_computed + count, len(sequence.tokens))
        self.memory.compute(sequence.tokens, sequence.num_computed, end, sequence.table)
        sequence.num_computed = end
        self.memory.keep(sequence.tokens[:end], sequence.slot)

    @rule(sequence=sequences, tokens=PROMPTS)
    def decode(self, sequence: Sequence, tokens: list[int]) -> None:
        """An answer is sampled, or a prompt has another part."""
        num_pages = -(-(len(sequence.tokens) + len(tokens)) // P) - len(sequence.table)
        if self.make_room(num_pages, 0):
            sequence.tokens += tokens
            sequence.table += self.pages.allocate(num_pages)
            self.compute(sequence, 99)

    @rule(sequence=sequences, count=st.integers(1, 20))
    def publish(self, sequence: Sequence, count: int) -> None:
        count = min(count, sequence.num_computed)
        if count == 0 or not self.make_room(0, 1):
            return
        [slot] = self.slots.allocate(1)
        self.memory.keep(sequence.tokens[:count], slot)
        self.note_published(sequence, self.published_count(sequence, count), slot)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> object:
        """Another choice of the same request: full pages shared, the rest copied."""
        num_full = sequence.num_computed // P
        if not self.make_room(len(sequence.table) - num_full, 1):
            return multiple()
        fresh, [slot] = self.pages.allocate(len(sequence.table) - num_full), self.slots.allocate(1)
        self.pages.share(sequence.table[:num_full])
        self.memory.row_PB[fresh] = self.memory.row_PB[sequence.table[num_full:]]
        self.memory.state_S[slot] = self.memory.state_S[sequence.slot]
        table = sequence.table[:num_full] + fresh
        twin = Sequence(list(sequence.tokens), table, slot, sequence.num_computed)
        self.running[twin] = None
        return twin

    @rule(sequence=consumes(sequences), is_kept=st.booleans())
    def end(self, sequence: Sequence, is_kept: bool) -> None:
        """An answer is over and its state is kept; or it is aborted, or preempted."""
        self.expect_right(sequence)
        del self.running[sequence]
        if is_kept and sequence.num_computed:
            self.note_published(sequence, sequence.num_computed, sequence.slot)
        else:
            self.slots.release([sequence.slot])
        self.pages.release(sequence.table)

    def note_published(self, sequence: Sequence, count: int, slot: int) -> None:
        prefix, free = tuple(sequence.tokens[:count]), self.slots.num_free
        published = self.cache.publish(sequence.tokens, count, sequence.table, slot)
        sequence.written.note(count, published)
        assert published.kept_state == (prefix not in self.cached)
        assert self.slots.num_free == free + (not published.kept_state)
        self.cached.add(prefix)

    @rule(num_pages=st.integers(0, 6), num_slots=st.integers(0, 3))
    def evict(self, num_pages: int, num_slots: int) -> None:
        slots_free, pages_free = self.slots.num_free, self.pages.num_free
        freed = self.cache.evict(num_pages, num_slots)
        assert freed == (self.pages.num_free - pages_free, self.slots.num_free - slots_free)
        self.note_evicted(freed.num_slots)

    @rule(tokens=PROMPTS, ttl_s=st.integers(1, 20))
    def pin(self, tokens: list[int], ttl_s: float) -> None:
        pin = self.cache.pin(tokens, ttl_s)
        known = [n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in self.cached]
        assert pin is None or pin.num_tokens == max(known)
        if pin is not None:
            assert pin.until_s >= self.now + ttl_s
            self.pins.append(Pinned(tuple(tokens[: pin.num_tokens]), pin.until_s))

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    @precondition(lambda self: self.now > 30)
    def clear(self) -> None:
        self.cache.clear()
        self.cached.clear()
        self.pins.clear()

    # What has to hold.

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        free = self.slots.num_free
        is_enough = self.cache.make_room(num_pages, num_slots)
        assert is_enough == (self.pages.num_free >= num_pages and self.slots.num_free >= num_slots)
        self.note_evicted(self.slots.num_free - free)
        return is_enough

    def note_evicted(self, num_states: int) -> None:
        """So many states left the card as slots became free; everything else is still found."""
        left = {prefix for prefix in self.cached if not self.is_found(prefix)}
        assert len(left) == num_states
        self.cached -= left

    def is_found(self, prefix: tuple[int, ...]) -> bool:
        return self.cache.peek([*prefix, NOBODY]) == len(prefix)

    def expect_right(self, sequence: Sequence) -> None:
        count = sequence.num_computed
        expected = tags(sequence.tokens[:count])
        assert self.memory.rows(sequence.table, count) == expected[1:]
        assert set(self.memory.state_S[sequence.slot].tolist()) == {expected[-1]}

    @invariant()
    def references_agree(self) -> None:
        pages: Counter[int] = Counter()
        for sequence in self.running:
            pages.update(sequence.table)
        self.cache.check(pages, Counter(sequence.slot for sequence in self.running))

    @invariant()
    def everything_cached_is_found(self) -> None:
        assert all(self.is_found(prefix) for prefix in self.cached)

    @invariant()
    def what_is_held_is_right(self) -> None:
        for found in self.open:
            hit, count = found.hit, found.hit.num_tokens
            expected = tags(found.tokens[:count])
            table = [*hit.pages, *([] if hit.partial_page is None else [hit.partial_page])]
            assert self.memory.rows(table, count) == expected[1:]
            if hit.slot is not None:
                assert set(self.memory.state_S[hit.slot].tolist()) == {expected[-1]}

    @invariant()
    def what_is_pinned_stays(self) -> None:
        self.pins = [pin for pin in self.pins if pin.until_s > self.now]
        assert all(pin.tokens in self.cached for pin in self.pins)

    def teardown(self) -> None:
        try:
            for found in self.open:
                self.cache.drop(found.hit)
            for sequence in self.running:
                self.pages.release(sequence.table)
                self.slots.release([sequence.slot])
            self.now += 1000
            self.cache.evict(NUM_PAGES, NUM_SLOTS)
            self.cache.check()
            assert self.pages.num_used == self.slots.num_used == 0
            self.empty()
        finally:
            shutil.rmtree(self.folder)

    def empty(self) -> None:
        """Nothing may be left anywhere once the cache is cleared."""
        self.cache.clear()
        self.cache.check()


class OffCardMachine(PrefixMachine):
    """What is evicted goes to host memory, from there to disk, and comes back."""

    def off_card(self) -> OffCard:
        self.files = CacheFiles(self.folder)
        self.disk = DiskTier(self.files, 2500, self.thread)
        self.tier = OffCard(self.memory, host_bytes=400, disk=self.disk, write_above=0.1)
        return self.tier

    @rule(tokens=PROMPTS)
    def bring_back(self, tokens: list[int]) -> None:
        hit = self.cache.lookup(tokens)
        self.cache.drop(hit)
        deeper = hit.deeper
        if deeper is None:
            assert self.cache.bring_back(tokens)
            return
        assert deeper.num_tokens > hit.num_tokens
        free = self.pages.num_free, self.slots.num_free
        is_enough = free[0] >= deeper.num_pages and free[1] >= deeper.num_slots
        try:
            is_done = self.cache.bring_back(tokens)
        except PoolFullError:
            assert not is_enough
            return
        if is_done and self.is_found(tuple(tokens[: deeper.num_tokens])):
            assert self.pages.num_free == free[0] - deeper.num_pages
            self.cached.add(tuple(tokens[: deeper.num_tokens]))

    @rule(tokens=PROMPTS)
    def serve_from_below(self, tokens: list[int]) -> None:
        """As a scheduler does: makes room, waits for the disk, then looks up again."""
        for _ in range(3):
            hit = self.cache.lookup(tokens)
            self.cache.drop(hit)
            if hit.deeper and self.make_room(hit.deeper.num_pages, hit.deeper.num_slots):
                self.bring_back(tokens)
                self.move(2)
        self.serve(tokens, [])

    @rule(num=st.integers(1, 6))
    def move(self, num: int) -> None:
        """The thread that reads and writes files gets on."""
        for _ in range(num):
            self.thread.run(1)
            self.cache.poll()

    @rule(at=st.integers(0, 200), is_cut=st.booleans())
    def damage(self, at: int, is_cut: bool) -> None:
        """A byte of every file changes, or they are cut short."""
        for path in self.files.folder.glob("*.cache"):
            content = bytearray(path.read_bytes()) or bytearray(1)
            at %= len(content)
            content[at] ^= 0x40
            path.write_bytes(content[:at] if is_cut else content)

    def empty(self) -> None:
        super().empty()
        self.thread.run()
        self.cache.poll()
        self.cache.check()
        assert self.tier.host_used == self.disk.used_bytes == 0
        assert not list(self.files.folder.glob("*.cache"))
        self.tier.close()
        assert not list(self.folder.glob("run-*"))


class ForgettingMachine(OffCardMachine):
    """What some have written has to go."""

    @rule(sequence=PrefixMachine.sequences)
    def forget(self, sequence: Sequence) -> None:
        """What it has written may be broken."""
        tokens, written = tuple(sequence.tokens), sequence.written
        self.cache.forget(tokens, written.first_row, written.states)
        gone = {tokens[:count] for count in written.states}
        left = {prefix for prefix in self.cached if not self.is_found(prefix)}
        assert gone & self.cached <= left
        rows = None if written.first_row is None else tokens[: written.first_row + 1]
        assert all(prefix[: len(rows or ())] == rows for prefix in left - gone)
        self.cached -= left
        self.pins = [pin for pin in self.pins if pin.tokens not in left]


QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestOnCard = PrefixMachine.TestCase
TestOnCard.settings = QUICK
TestOffCard = OffCardMachine.TestCase
TestOffCard.settings = QUICK
TestForgetting = ForgettingMachine.TestCase
TestForgetting.settings = QUICK


class OneTokenTooMany(PrefixMachine):
    """A state is published for a token that it has not seen."""

    def published_count(self, sequence: Sequence, count: int) -> int:
        return min(count + 1, sequence.num_computed)


class SharedPartialPage(PrefixMachine):
    """The last page of a hit is shared and written on, not copied."""

    def table_of(self, hit: Hit, num_tokens: int) -> list[int]:
        table = super().table_of(hit, num_tokens)
        if hit.partial_page is not None:
            self.pages.release([table[len(hit.pages)]])
            self.pages.share([hit.partial_page])
            table[len(hit.pages)] = hit.partial_page
        return table


class _Careless(PrefixCache):
    def lookup(self, token_ids):
        hit = super().lookup(token_ids)
        path, table, slots = self._open[hit]
        self._pages.release(table)
        self._slots.release(slots)
        self._open[hit] = Held(path, [], [])
        return hit


class HeldByNobody(PrefixMachine):
    """A hit takes no references, so that what it names can be evicted under it."""

    def new_cache(self, off_card: OffCard | None) -> PrefixCache:
        options = {"page_len": P, "cost": COST, "clock": lambda: self.now}
        return _Careless(self.pages, self.slots, off_card=off_card, **options)


def _parents_page(self, path):
    """Of two nodes that share a page, the parent's counts."""
    table = []
    for node in path:
        table += node.pages[len(table) - node.start // self.page_len :]
    return table


def _without_a_reference(self, node, at, table):
    head = cut(self, node, at, table)
    if at % self.page_len and node.pages:
        self._pages.release([node.pages[0]])
        self._held[node.pages[0]] -= 1
    return head


def _rotting(self, number, content):
    write(self, number, content)
    stored = self.path(number).read_bytes()
    self.path(number).write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))


cut, write = CachedTree._cut, CacheFiles.write
FAULTS = {
    "one_token_too_many": (OneTokenTooMany, {}),
    "shared_partial_page": (SharedPartialPage, {}),
    "held_by_nobody": (HeldByNobody, {}),
    "parents_page": (PrefixMachine, {(CachedTree, "page_table"): _parents_page}),
    "split_page_counted_once": (PrefixMachine, {(CachedTree, "_cut"): _without_a_reference}),
    "duplicates_are_kept": (
        PrefixMachine,
        {(SlotPool, "release"): lambda self, numbers: None},
    ),
    "damage_is_not_seen": (
        OffCardMachine,
        {
            (CacheFiles, "write"): _rotting,
            (CacheFiles, "_header"): lambda self, number, content: b"\0" * 72,
        },
    ),
    "buffers_are_not_waited_for": (
        OffCardMachine,
        {(ArrayMemory, "wait"): lambda self: None},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    machine, patches = FAULTS[fault]
    for (owner, name), replacement in patches.items():
        monkeypatch.setattr(owner, name, replacement)
    search = settings(QUICK, max_examples=300, phases=[Phase.generate], derandomize=True)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(machine, settings=search)
