"""Host memory and disk behind the card: what is kept, what is lost, and how that shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest

from perilune.engine.cache_files import CacheFiles
from perilune.engine.cost_model import CostModel
from perilune.engine.disk_tier import DiskTier
from perilune.engine.errors import PoolFullError
from perilune.engine.fake_card_memory import ArrayMemory, LateExecutor
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.slots import SlotPool
from perilune.engine.stored import Stored

P = 4
COST = CostModel(token_flops=1.0, pair_flops=0.0, row_bytes=8, state_bytes=24)
STATE, FILE = 24, CacheFiles.file_bytes(24)


@pytest.fixture
def memory() -> ArrayMemory:
    memory = ArrayMemory(num_pages=32, num_slots=16, page_len=P)
    memory.state_S[:] = np.arange(16)[:, None]
    return memory


@pytest.fixture
def thread() -> LateExecutor:
    return LateExecutor()


@pytest.fixture
def files(tmp_path) -> Iterator[CacheFiles]:
    files = CacheFiles(tmp_path)
    yield files
    files.close()


@pytest.fixture
def tier(memory, files, thread) -> OffCard:
    """Three states in host memory, all but one of them on disk as well, which holds five."""
    disk = DiskTier(files, 5 * FILE, thread)
    return OffCard(memory, host_bytes=3 * STATE, disk=disk, write_above=0.4)


def settle(tier: OffCard, thread: LateExecutor) -> None:
    while thread.waiting:
        thread.run(1)
        tier.poll()


def state_of(tier: OffCard, memory: ArrayMemory, stored: Stored) -> int | None:
    """What comes back, through a slot that is free."""
    if not tier.write_state(stored, 15):
        return None
    return int(memory.state_S[15, 0])


def test_without_a_disk_the_oldest_are_lost(memory):
    tier = OffCard(memory, host_bytes=3 * STATE)
    kept = [tier.put_state(slot) for slot in range(5)]
    assert tier.drain_lost() == kept[:2]
    assert tier.drain_lost() == []
    assert [state_of(tier, memory, stored) for stored in kept] == [None, None, 2, 3, 4]
    tier.check(kept[2:])


def test_what_is_larger_than_the_host_is_refused(memory):
    tier = OffCard(memory, host_bytes=STATE - 1)
    assert tier.put_state(0) is None
    assert tier.host_used == 0


def test_with_a_disk_the_oldest_move_down_and_come_back(tier, memory, thread):
    kept = []
    for slot in range(5):
        kept.append(tier.put_state(slot))
        tier.poll()
        settle(tier, thread)
    assert tier.drain_lost() == []
    assert tier.host_used == 3 * STATE
    assert not tier.prepare(kept[:1])
    settle(tier, thread)
    assert tier.prepare(kept[:1])
    assert state_of(tier, memory, kept[0]) == 0
    tier.check(kept)
    for stored in kept:
        tier.forget(stored)
    assert (tier.host_used, tier._disk.used_bytes) == (0, 0)


def test_a_disk_that_is_full_loses_the_oldest(tier, memory, thread):
    kept = []
    for slot in range(9):
        kept.append(tier.put_state(slot))
        tier.poll()
        settle(tier, thread)
    lost = tier.drain_lost()
    assert lost == kept[: len(lost)]
    assert len(lost) == 3  # five on disk, and the newest in host memory alone
    tier.check(kept[len(lost) :])


def test_a_slow_disk_loses_entries_and_no_bytes(tier, thread):
    kept = [tier.put_state(slot) for slot in range(6)]
    assert tier.host_used <= 3 * STATE
    lost = tier.drain_lost()
    tier.check(set(kept) - set(lost))
    assert len(lost) == 3


def test_a_damaged_file_is_a_logged_loss(tier, files, memory, thread, caplog):
    kept = []
    for slot in range(5):
        kept.append(tier.put_state(slot))
        tier.poll()
        settle(tier, thread)
    path = files.path(kept[0].number)
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        tier.prepare(kept[:1])
        settle(tier, thread)
    assert "a cached prefix is lost" in caplog.text
    assert tier.prepare(kept[:1])
    assert state_of(tier, memory, kept[0]) is None
    assert tier.drain_lost() == [kept[0]]
    tier.check(kept[1:])


def test_a_disk_that_cannot_be_written_is_given_up(tier, thread, monkeypatch, caplog):
    def fails(self, number, content):
        raise OSError("no space left")

    monkeypatch.setattr(CacheFiles, "write", fails)
    with caplog.at_level(logging.WARNING):
        for slot in range(6):
            tier.put_state(slot)
            tier.poll()
            settle(tier, thread)
    assert caplog.text.count("goes on without writing to disk: no space left") == 1
    assert tier._disk.used_bytes == 0
    assert len(tier.drain_lost()) == 3


def test_a_fault_of_ours_is_not_taken_for_one_of_the_disk(tier, thread, monkeypatch):
    monkeypatch.setattr(CacheFiles, "write", lambda self, number, content: {}["no"])
    tier.put_state(0)
    tier.put_state(1)
    tier.poll()
    with pytest.raises(KeyError):
        settle(tier, thread)


def test_forgetting_waits_for_the_thread_before_bytes_are_free(tier, files, thread):
    first, second = tier.put_state(0), tier.put_state(1)
    tier.poll()
    tier.forget(first)
    tier.forget(second)
    assert tier.host_used == STATE  # of the one that is being written
    settle(tier, thread)
    assert (tier.host_used, tier._disk.used_bytes) == (0, 0)
    assert not list(files.folder.glob("*.cache"))


@pytest.fixture
def cache(memory):
    """Three states and nine pages on the card, and room for many behind it."""
    pages, slots = PagePool(10), SlotPool(3)
    memory.free_pages(range(10))
    big = OffCard(memory, host_bytes=10_000)
    return PrefixCache(pages, slots, page_len=P, cost=COST, off_card=big)


def put(cache: PrefixCache, tokens: list[int]) -> None:
    cache.make_room(-(-len(tokens) // P), 1)
    table, [slot] = cache._pages.allocate(-(-len(tokens) // P)), cache._slots.allocate(1)
    cache.publish(tokens, len(tokens), table, slot)
    cache._pages.release(table)


def test_the_card_holds_less_than_what_can_be_hit(cache):
    prompts = [[*range(start, start + 9)] for start in range(0, 100, 10)]
    for prompt in prompts:
        put(cache, prompt)
    assert sum(cache.peek([*prompt, 99]) for prompt in prompts) == 3 * 9
    for prompt in prompts:
        hit = cache.lookup([*prompt, 99])
        cache.drop(hit)
        if hit.deeper:
            assert hit.deeper == (9, 3, 1)
            with pytest.raises(PoolFullError):
                cache.bring_back([*prompt, 99])
            assert cache.make_room(*hit.deeper[1:])
            assert cache.bring_back([*prompt, 99])
        assert cache.peek([*prompt, 99]) == 9
        cache.check()


def test_rows_computed_anew_replace_those_off_the_card(cache):
    put(cache, [*range(12)])
    cache.evict(9, 3)
    assert len(cache._tree.owner) == 2  # rows and a state
    put(cache, [*range(6)])
    cache.check()
    hit = cache.lookup([*range(13)])
    assert (hit.num_tokens, hit.deeper) == (6, (12, 2, 1))
    cache.drop(hit)
    put(cache, [*range(12)])
    assert not cache._tree.owner
    assert cache.peek([*range(13)]) == 12


def test_a_prefix_larger_than_the_host_is_not_promised(memory):
    pages, slots = PagePool(10), SlotPool(3)
    small = OffCard(memory, host_bytes=2 * 32 + STATE)
    cache = PrefixCache(pages, slots, page_len=P, cost=COST, off_card=small)
    put(cache, [*range(4)])
    put(cache, [*range(8)])
    put(cache, [*range(12)])
    cache.evict(9, 3)
    cache.check()
    hit = cache.lookup([*range(13)])
    assert hit.num_tokens == 0
    assert hit.deeper is None or hit.deeper.num_tokens <= 8
    cache.drop(hit)


def test_a_real_thread_moves_the_same_bytes(memory, tmp_path):
    with ThreadPoolExecutor(1) as executor:
        disk = DiskTier(CacheFiles(tmp_path), 100 * FILE, executor)
        tier = OffCard(memory, host_bytes=3 * STATE, disk=disk, write_above=0.0)
        kept = []
        for slot in range(12):
            kept.append(tier.put_state(slot))
            for _ in count():
                tier.poll()
                if not disk.is_writing:
                    break
        for slot, stored in enumerate(kept):
            while not tier.prepare([stored]):
                pass
            assert state_of(tier, memory, stored) == slot
        assert tier.drain_lost() == []
        tier.close()
    assert not list(tmp_path.glob("run-*"))
