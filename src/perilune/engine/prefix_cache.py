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
    cache.publish(token_ids, at[0].num_tokens, page_table, checkpoint_slot, at[0].reason)
    ...                                       # the end: the sequence releases its own references

Reuse of what a step writes begins with the next step, because `lookup` comes before the step and
`publish` after it. Not thread-safe: it belongs to the thread that schedules.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from perilune.engine.cached_tree import CachedTree
from perilune.engine.chances import Chances, Reason
from perilune.engine.cost_model import CostModel
from perilune.engine.eviction import Scores
from perilune.engine.finding import branch_points, deeper, down_to_state, usable
from perilune.engine.hit import Held, Hit
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.pins import Pin, Pins
from perilune.engine.prefix_use import Published
from perilune.engine.radix_tree import Node, TokenIds, Walk, as_tokens
from perilune.engine.reclaim import Freed, Reclaimer
from perilune.engine.restore import restore
from perilune.engine.slots import SlotPool

ALPHA = 0.15


class PrefixCache:
    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        *,
        page_len: int,
        cost: CostModel,
        alpha: float = ALPHA,
        max_pinned: float = 0.5,
        off_card: OffCard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`alpha` weighs FLOPs saved per byte against recency (`eviction`); 0: recency alone.
        `page_len`: tokens of a page.
        `max_pinned`: the largest part of either pool that pins may keep."""
        self._pages = pages
        self._slots = slots
        self._page_len = page_len
        self._off_card = off_card
        forget = off_card.forget if off_card is not None else lambda stored: None
        self._tree = CachedTree(pages, slots, page_len, forget)
        self._pins = Pins(pages, slots, max_pinned, clock)
        self._chances = Chances()
        scores = Scores(cost, self._chances, alpha=alpha, page_len=page_len)
        self._reclaimer = Reclaimer(
            self._tree, pages, slots, scores, off_card, self._pins.is_pinned
        )
        self._row_bytes, self._state_bytes = cost.row_bytes, cost.state_bytes
        self._turnover_bytes = max(
            pages.capacity * page_len * cost.row_bytes + slots.capacity * cost.state_bytes, 1
        )
        self._entered_bytes = 0
        self._open: dict[Hit, Held] = {}

    def lookup(self, token_ids: TokenIds) -> Hit:
        """The longest usable prefix that leaves at least one token to compute.

        The hit holds a reference to every page and slot that it names, until `settle` or `drop`.
        """
        walk = self._walk(token_ids)
        found = usable(walk.path)
        num_tokens = found[-1].end if found else 0
        table = self._tree.page_table(found)
        num_full = num_tokens // self._page_len
        hit = Hit(
            num_tokens=num_tokens,
            pages=tuple(table[:num_full]),
            partial_page=table[num_full] if num_full < len(table) else None,
            slot=found[-1].slot if found else None,
            branch_points=branch_points(walk, len(found)),
            deeper=deeper(walk.path, len(found), self._tree, self._off_card),
        )
        self._open[hit] = Held(found, table, [] if hit.slot is None else [hit.slot])
        self._pages.share(table)
        self._slots.share(self._open[hit].slots)
        return hit

    def peek(self, token_ids: TokenIds) -> int:
        """The length of the hit that `lookup` would return; holds and changes nothing."""
        found = usable(self._walk(token_ids).path)
        return found[-1].end if found else 0

    def settle(self, hit: Hit) -> None:
        """State and partial page have been copied (enqueued on the stream that will write over
        them): both are let go, and the references to `hit.pages` are now the caller's.

        Raises:
            KeyError: the hit was settled or dropped before.
        """
        held = self._open.pop(hit)
        self._pages.release(held.table[len(hit.pages) :])
        self._slots.release(held.slots)
        for node in held.path[-1:]:
            self._chances.note_hit(node.reason, node.num_hits)
            node.num_hits += 1
            self._use(held.path)

    def drop(self, hit: Hit) -> None:
        """Lets go of all that the hit names. Raises KeyError as `settle` does."""
        held = self._open.pop(hit)
        self._pages.release(held.table)
        self._slots.release(held.slots)

    def publish(
        self,
        token_ids: TokenIds,
        num_tokens: int,
        page_table: Sequence[int],
        slot: int,
        reason: Reason = "end",
    ) -> Published:
        """Makes the first `num_tokens` tokens a prefix that others can hit.

        `page_table` holds their rows and `slot` the state after exactly so many. The reference to
        `slot` passes to the cache, which frees it if it has that state already. The pages stay the
        caller's as well, who may go on writing behind the published rows. Of rows that are known
        already the cache keeps its own.

        Raises:
            ValueError: no token, fewer token ids than that, too few pages, or a page or slot that
                is not in use.
        """
        tokens = as_tokens(token_ids)[:num_tokens]
        num_pages = -(-num_tokens // self._page_len)
        if not 0 < num_tokens == len(tokens) or len(page_table) < num_pages:
            raise ValueError(
                f"{num_tokens} tokens to publish, of {len(tokens)} in {len(page_table)} pages"
            )
        self._pages.check_used(page_table[:num_pages])
        self._slots.check_used([slot])
        path, num_known = self._tree.insert(tokens, page_table)
        self._entered_bytes += (num_tokens - num_known) * self._row_bytes
        node = path[-1]
        kept = node.slot is None
        if kept:
            self._tree.give_state(node, slot)
            self._entered_bytes += self._state_bytes
            self._note_kept(node, reason)
        else:
            self._slots.release([slot])
        self._use(path)
        return Published(num_tokens - num_known, kept)

    def evict(self, num_pages: int, num_slots: int) -> Freed:
        """Gives up the least valuable prefixes until so many pages and slots more are free.

        Fewer are freed when the rest is pinned, held by a hit, or in use by a sequence.
        """
        return self._reclaimer.evict(num_pages, num_slots)

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        """Evicts what is missing for so many to be free; False: it is not enough."""
        self._reclaimer.evict(num_pages - self._pages.num_free, num_slots - self._slots.num_free)
        return self._pages.num_free >= num_pages and self._slots.num_free >= num_slots

    def unpin(self) -> None:
        """Whatever is pinned can be evicted from now on."""
        self._pins.clear()

    def pin(self, token_ids: TokenIds, ttl_s: float) -> Pin | None:
        """Keeps the longest prefix of `token_ids` with a state on the card for `ttl_s` from now.

        A later end is never brought forward. None: nothing is cached, or pins hold as much of a
        pool as they may.
        """
        return self._pins.pin(usable(self._tree.walk(as_tokens(token_ids)).path), ttl_s)

    def bring_back(self, token_ids: TokenIds) -> bool:
        """Copies what `Hit.deeper` promised to the card; afterwards `lookup` finds it.

        False: it is being read from disk; ask again in a later step. After True a lookup may still
        find less: what turns out to be damaged is dropped.

        Raises:
            PoolFullError: the pages and slots of `Hit.deeper` are not free; nothing has changed.
        """
        if self._off_card is None:
            return True
        path = down_to_state(self._walk(token_ids).path)
        is_done = restore(path, self._tree, self._off_card, self._pages, self._slots)
        for node in path:
            self._reclaimer.offer(node)
        return is_done

    def forget(self, token_ids: TokenIds, first_row: int | None, states: Collection[int]) -> None:
        """Drops what a sequence with these tokens has written, pinned or off the card too: the
        states after so many tokens, and its rows from `first_row` on, with all that is behind them.
        What the same tokens have of others stays."""
        path = self._tree.walk(as_tokens(token_ids)).path
        rows = [node for node in path if first_row is not None and node.start >= first_row]
        for node in path:
            if node.end in states:
                node.pinned_until_s = -math.inf
                self._tree.drop_state(node)
        for node in rows[:1]:
            self._tree.drop_below(node)
        for node in reversed(path):
            self._tree.prune(node)
            self._reclaimer.offer(node)

    def clear(self) -> None:
        """Forgets everything, pinned or off the card too: the weights have changed, say."""
        for child in list(self._tree.root.children.values()):
            self._tree.drop_below(child)

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
        for held in self._open.values():
            pages.update(held.table)
            slots.update(held.slots)
        self._pages.check(pages + Counter(page_references))
        self._slots.check(slots + Counter(slot_references))
        if self._off_card is not None:
            self._off_card.check(self._tree.owner)

    def _walk(self, token_ids: TokenIds) -> Walk:
        return self._tree.walk(as_tokens(token_ids)[: len(token_ids) - 1])

    def _note_kept(self, node: Node, reason: Reason) -> None:
        """A state that comes back after it was given up keeps its record."""
        if node.num_hits == 0:
            node.reason = reason
            self._chances.note_kept(reason)

    def _use(self, path: Sequence[Node]) -> None:
        """Rows serve whoever passes over them, a state only whoever stops there."""
        now = self._entered_bytes / self._turnover_bytes
        for node in path:
            node.rows_used = now
        path[-1].state_used = now
        self._reclaimer.offer(path[-1])
