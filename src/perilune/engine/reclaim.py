"""Makes room in both pools: off the card where there is a place for it, else out of the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from perilune.engine.cached_tree import CachedTree
from perilune.engine.eviction import Scores, Victims
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.radix_tree import Node
from perilune.engine.slots import SlotPool


class Freed(NamedTuple):
    num_pages: int
    num_slots: int


class Reclaimer:
    """Nothing that is pinned, held by a hit, or in use by a sequence is given up.

    A leaf gives up its rows and its state together; a node inside of the tree, its state alone.
    """

    def __init__(
        self,
        tree: CachedTree,
        pages: PagePool,
        slots: SlotPool,
        scores: Scores,
        off_card: OffCard | None,
        is_pinned: Callable[[Node], bool],
    ) -> None:
        self._tree = tree
        self._pages = pages
        self._slots = slots
        self._off_card = off_card
        self._is_pinned = is_pinned
        self._leaves = Victims(scores.of_leaf, _is_leaf)
        self._states = Victims(scores.of_state, _has_slot)
        tree.on_leaf = self._leaves.offer

    def offer(self, node: Node) -> None:
        """Takes note of a node that has come to hold rows or a state on the card."""
        self._leaves.offer(node)
        self._states.offer(node)

    def evict(self, num_pages: int, num_slots: int) -> Freed:
        """Frees so many of each, or all that can be freed."""
        before = self._pages.num_free, self._slots.num_free
        pages_free, slots_free = before[0] + num_pages, before[1] + num_slots
        leaves = self._leaves.take(self._is_leaf_free)
        while self._pages.num_free < pages_free and (leaf := next(leaves, None)) is not None:
            self._evict_leaf(leaf)
        leaves.close()
        states = self._states.take(self._is_state_free)
        while self._slots.num_free < slots_free and (node := next(states, None)) is not None:
            self._evict_state(node)
        states.close()
        return Freed(self._pages.num_free - before[0], self._slots.num_free - before[1])

    def note_losses(self) -> None:
        """Takes out of the tree what the off-card tier had no room for, and what hung on it."""
        if self._off_card is not None:
            for stored in self._off_card.drain_lost():
                if stored in self._tree.owner:
                    self._tree.lose(stored)

    def _evict_leaf(self, leaf: Node) -> None:
        self._evict_slot(leaf)
        rows = None
        if self._off_card is not None and (leaf.has_state or leaf.children):
            assert leaf.pages is not None
            first = self._tree.page_range(leaf).start
            rows = self._off_card.put_pages(leaf.pages, first)
        if rows is None:
            self._tree.drop_below(leaf)
        else:
            self._tree.store_rows(leaf, rows)
        self.note_losses()

    def _evict_state(self, node: Node) -> None:
        self._evict_slot(node)
        self._tree.prune(node)
        self._leaves.offer(node)
        self.note_losses()

    def _evict_slot(self, node: Node) -> None:
        if node.slot is not None:
            state = None if self._off_card is None else self._off_card.put_state(node.slot)
            self._tree.drop_state(node)
            if state is not None:
                self._tree.store_state(node, state)

    def _is_leaf_free(self, leaf: Node) -> bool:
        return self._is_state_free(leaf) and not self._tree.is_used_elsewhere(leaf)

    def _is_state_free(self, node: Node) -> bool:
        is_held = node.slot is not None and self._slots.count(node.slot) > 1
        return not is_held and not self._is_pinned(node)


def _is_leaf(node: Node) -> bool:
    return node.pages is not None and node.num_children_on_card == 0 and node.parent is not None


def _has_slot(node: Node) -> bool:
    return node.slot is not None
