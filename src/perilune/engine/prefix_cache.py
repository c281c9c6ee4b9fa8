"""The prefix cache of a hybrid model: rows of latents and states, found by the tokens before them.

A *row* can be shared by everybody who has the same tokens before it. A *state* serves only one
token count. A hit therefore ends exactly where a state was kept and is covered by rows: one number
for both pools. What is published is never written again.

What the scheduler does:

    hit = cache.lookup(token_ids)             # holds what it names; hit.num_tokens < len(token_ids)
    at = cuts(len(token_ids), hit.num_tokens, hit.branch_points, retention)  # where to keep states
    cache.make_room(num_pages, num_slots)     # evicts what is missing; False: preempt somebody
    # Enqueue the copies: hit.slot to the sequence's own slot, the first rows of hit.partial_page to
    # a page of its own. Its page table begins with hit.pages.
    cache.settle(hit)                         # or drop(hit), if it does not run after all
    ...                                       # the step that leaves the state has been enqueued:
    cache.publish(token_ids, at[0], page_table, checkpoint_slot)
    ...                                       # the end: the sequence releases its own references

Reuse of what a step writes begins with the next step, because `lookup` comes before the step and
`publish` after it. Not thread-safe: it belongs to the thread that schedules.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perilune.engine.cached_tree import CachedTree
from perilune.engine.cost_model import CostModel
from perilune.engine.eviction import Scores
from perilune.engine.hit import Deeper, Hit
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.pins import Pin, Pins
from perilune.engine.radix_tree import Node, TokenIds, Walk, as_tokens
from perilune.engine.reclaim import Reclaimer
from perilune.engine.restore import restore
from perilune.engine.slots import SlotPool


class Published(NamedTuple):
    num_new_tokens: int
    """Rows that were not on the card before: what this request has written."""
    kept_state: bool
    """False: the state was there already, and the slot has been freed."""


class Freed(NamedTuple):
    num_pages: int
    num_slots: int


class PrefixCache:
    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        *,
        page_len: int,
        cost: CostModel,
        alpha: float = 1.0,
        max_pinned: float = 0.5,
        off_card: OffCard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`alpha` weighs FLOPs saved per byte against recency (`eviction`); 0: recency alone.
        `max_pinned`: the largest part of either pool that pins may keep."""
        self._pages = pages
        self._slots = slots
        self._page_len = page_len
        self._off_card = off_card
        forget = off_card.forget if off_card is not None else lambda stored: None
        self._tree = CachedTree(pages, slots, page_len, forget)
        self._pins = Pins(pages, slots, max_pinned, clock)
        scores = Scores(cost, alpha, page_len)
        self._reclaimer = Reclaimer(
            self._tree, pages, slots, scores, off_card, self._pins.is_pinned
        )
        self._row_bytes, self._state_bytes = cost.row_bytes, cost.state_bytes
        self._turnover_bytes = max(
            pages.capacity * page_len * cost.row_bytes + slots.capacity * cost.state_bytes, 1
        )
        self._entered_bytes = 0
        self._open: dict[Hit, tuple[list[int], list[int]]] = {}

    def lookup(self, token_ids: TokenIds) -> Hit:
        """The longest usable prefix that leaves at least one token to compute.

        The hit holds a reference to every page and slot that it names, until `settle` or `drop`.
        """
        walk = self._walk(token_ids)
        found = _usable(walk.path)
        branch_points = _branch_points(walk, len(found))
        deeper = self._deeper(walk.path, len(found))
        if not found:
            hit = Hit(branch_points=branch_points, deeper=deeper)
            self._open[hit] = [], []
            return hit
        slot, num_tokens = found[-1].slot, found[-1].end
        assert slot is not None
        table = self._tree.page_table(found)
        num_full = num_tokens // self._page_len
        hit = Hit(
            num_tokens=num_tokens,
            pages=tuple(table[:num_full]),
            partial_page=table[num_full] if num_full < len(table) else None,
            slot=slot,
            branch_points=branch_points,
            deeper=deeper,
        )
        self._pages.share(table)
        self._slots.share([slot])
        self._open[hit] = table, [slot]
        self._use(found)
        return hit

    def peek(self, token_ids: TokenIds) -> int:
        """The length of the hit that `lookup` would return; holds and changes nothing."""
        found = _usable(self._walk(token_ids).path)
        return found[-1].end if found else 0

    def settle(self, hit: Hit) -> None:
        """State and partial page have been copied (enqueued on the stream that will write over
        them): both are let go, and the references to `hit.pages` are now the caller's.

        Raises:
            KeyError: the hit was settled or dropped before.
        """
        table, slots = self._open.pop(hit)
        self._pages.release(table[len(hit.pages) :])
        self._slots.release(slots)

    def drop(self, hit: Hit) -> None:
        """Lets go of all that the hit names. Raises KeyError as `settle` does."""
        table, slots = self._open.pop(hit)
        self._pages.release(table)
        self._slots.release(slots)

    def publish(
        self, token_ids: TokenIds, num_tokens: int, page_table: Sequence[int], slot: int
    ) -> Published:
        """Makes the first `num_tokens` tokens a prefix that others can hit.

        `page_table` holds their rows and `slot` the state after exactly so many. The reference to
        `slot` passes to the cache, which frees it if it has that state already. The pages stay the
        caller's as well, who may go on writing behind the published rows. Of rows that are known
        already the cache keeps its own.

        Raises:
            ValueError: no token, fewer token ids than that, or too few pages.
        """
        tokens = as_tokens(token_ids)[:num_tokens]
        if not 0 < num_tokens == len(tokens) <= len(page_table) * self._page_len:
            raise ValueError(
                f"{num_tokens} tokens to publish, of {len(tokens)} in {len(page_table)} pages"
            )
        path, num_known = self._insert(tokens, page_table)
        node = path[-1]
        kept = node.slot is None
        if kept:
            self._tree.give_state(node, slot)
            self._entered_bytes += self._state_bytes
        else:
            self._slots.release([slot])
        self._use(path)
        return Published(num_tokens - num_known, kept)

    def evict(self, num_pages: int, num_slots: int) -> Freed:
        """Gives up the least valuable prefixes until so many pages and slots more are free.

        Fewer are freed when the rest is pinned, held by a hit, or in use by a sequence.
        """
        before = self._pages.num_free, self._slots.num_free
        self._reclaimer.evict(num_pages, num_slots)
        return Freed(self._pages.num_free - before[0], self._slots.num_free - before[1])

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        """Evicts what is missing for so many to be free; False: it is not enough."""
        self._reclaimer.evict(num_pages - self._pages.num_free, num_slots - self._slots.num_free)
        return self._pages.num_free >= num_pages and self._slots.num_free >= num_slots

    def pin(self, token_ids: TokenIds, ttl_s: float) -> Pin | None:
        """Keeps the longest prefix of `token_ids` with a state on the card for `ttl_s` from now.

        A later end is never brought forward. None: nothing is cached, or pins hold as much of a
        pool as they may.
        """
        return self._pins.pin(_usable(self._tree.walk(as_tokens(token_ids)).path), ttl_s)

    def bring_back(self, token_ids: TokenIds) -> bool:
        """Copies what `Hit.deeper` promised to the card; afterwards `lookup` finds it.

        False: it is being read from disk; ask again in a later step. After True a lookup may still
        find less: what turns out to be damaged is dropped.

        Raises:
            PoolFullError: the pages and slots of `Hit.deeper` are not free; nothing has changed.
        """
        if self._off_card is None:
            return True
        path = _down_to_state(self._walk(token_ids).path)
        is_done = restore(path, self._tree, self._off_card, self._pages, self._slots)
        for node in path:
            self._reclaimer.offer(node)
        return is_done

    def poll(self) -> None:
        """Takes note of what the off-card tier has done or lost; call it once a step."""
        if self._off_card is not None:
            self._off_card.poll()
            self._reclaimer.note_losses()

    def check(
        self, page_references: Mapping[int, int] = {}, slot_references: Mapping[int, int] = {}
    ) -> None:
        """Asserts that tree, hits and both pools agree; the arguments are what sequences hold."""
        self._tree.check()
        pages, slots = self._tree.references()
        for table, held_slots in self._open.values():
            pages.update(table)
            slots.update(held_slots)
        self._pages.check(pages + Counter(page_references))
        self._slots.check(slots + Counter(slot_references))
        if self._off_card is not None:
            self._off_card.check(self._tree.owner)

    def _walk(self, token_ids: TokenIds) -> Walk:
        return self._tree.walk(as_tokens(token_ids)[: len(token_ids) - 1])

    def _insert(self, tokens: np.ndarray, table: Sequence[int]) -> tuple[list[Node], int]:
        """The path of `tokens`, all of it on the card, and how many of them were there before."""
        tree = self._tree
        path, node, inside, num_matched = tree.walk(tokens)
        num_known = max((n.end for n in path if n.pages is not None), default=0)
        for known in path:
            if known.pages is None:
                tree.give_rows(known, tree.part(known, table))
        if inside is not None:
            num_known = num_matched if inside.pages is not None else num_known
            path.append(tree.cut(inside, num_matched, table))
            node = path[-1]
        if num_matched < len(tokens):
            path.append(tree.attach(node, tokens[num_matched:]))
            tree.give_rows(path[-1], tree.part(path[-1], table))
        self._entered_bytes += (len(tokens) - num_known) * self._row_bytes
        return path, num_known

    def _use(self, path: Sequence[Node]) -> None:
        """Rows serve whoever passes over them, a state only whoever stops there."""
        now = self._entered_bytes / self._turnover_bytes
        for node in path:
            node.rows_used = now
        path[-1].state_used = now
        self._reclaimer.offer(path[-1])

    def _deeper(self, path: Sequence[Node], num_found: int) -> Deeper | None:
        target = _down_to_state(path)
        if self._off_card is None or len(target) <= num_found:
            return None
        missing = [node for node in target if node.pages is None]
        stored = [node.rows for node in missing] + [target[-1].state]
        if not self._off_card.can_prepare([s for s in stored if s is not None]):
            return None
        num_pages = sum(len(self._tree.page_range(node)) for node in missing)
        return Deeper(target[-1].end, num_pages, int(target[-1].slot is None))


def _usable(path: Sequence[Node]) -> Sequence[Node]:
    """Down to the last state on the card; its rows then are there too."""
    return _down_to(path, lambda node: node.slot is not None)


def _down_to_state(path: Sequence[Node]) -> Sequence[Node]:
    return _down_to(path, lambda node: node.has_state)


def _down_to(path: Sequence[Node], is_end: Callable[[Node], bool]) -> Sequence[Node]:
    for depth in range(len(path), 0, -1):
        if is_end(path[depth - 1]):
            return path[:depth]
    return ()


def _branch_points(walk: Walk, num_found: int) -> tuple[int, ...]:
    """Where others have left the known tokens, and where this prompt does."""
    beyond = walk.path[num_found:]
    forks = [node.end for node in beyond if node.slot is None and len(node.children) > 1]
    if walk.num_matched > (walk.path[num_found - 1].end if num_found else 0):
        forks.append(walk.num_matched)
    return tuple(sorted(set(forks)))
