"""Prefixes that stay on the card for a time, whatever else is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from perilune.engine.pages import PagePool
from perilune.engine.radix_tree import Node, path_of
from perilune.engine.slots import SlotPool


class Pin(NamedTuple):
    num_tokens: int
    until_s: float
    """By the cache's clock."""


class Pins:
    """A pinned node keeps its state, and with it every row before.

    Pins may not take all of a pool, or nothing could run any more.
    """

    def __init__(
        self, pages: PagePool, slots: SlotPool, max_share: float, clock: Callable[[], float]
    ) -> None:
        self._max_pages = int(max_share * pages.capacity)
        self._max_slots = int(max_share * slots.capacity)
        self._clock = clock
        self._pinned: dict[Node, None] = {}

    def is_pinned(self, node: Node) -> bool:
        return node.pinned_until_s > self._clock()

    def pin(self, path: Sequence[Node], ttl_s: float) -> Pin | None:
        """Pins the end of a path on the card; None: it is empty, or there is no room for it."""
        self._pinned = {node: None for node in self._pinned if self.is_pinned(node)}
        if not path or not self._fits([*self._pinned, path[-1]]):
            return None
        node = path[-1]
        self._pinned[node] = None
        node.pinned_until_s = max(node.pinned_until_s, self._clock() + ttl_s)
        return Pin(node.end, node.pinned_until_s)

    def clear(self) -> None:
        """Nothing is pinned any more."""
        for node in self._pinned:
            node.pinned_until_s = -math.inf
        self._pinned.clear()

    def _fits(self, pinned: Iterable[Node]) -> bool:
        ends = set(pinned)
        kept = {node for end in ends for node in path_of(end)}
        num_pages = sum(len(node.pages or ()) for node in kept)
        return num_pages <= self._max_pages and len(ends) <= self._max_slots
