"""Which cached state or rows to give up first: recency plus FLOPs saved per byte.

Marconi (arXiv 2411.19379), 4.2: the bytes of a state and those of rows save very different amounts
of work, so time of use alone keeps the wrong ones. Two things differ here:

- Recency is measured in *turnovers*: bytes that entered the cache, over what it holds. A score then
  stands still until the piece is used again, whatever the load, and a heap finds the least.
- What is added is the logarithm of the FLOPs per byte that the piece may be *expected* to save, its
  chance of being hit included (`chances`). If that chance falls exponentially with age, by e every
  `alpha` turnovers, the order of scores is that of expected savings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from itertools import count

from perilune.engine.chances import Chances
from perilune.engine.cost_model import CostModel
from perilune.engine.radix_tree import Node


class Victims:
    """Nodes that hold one kind of memory, the least worth keeping first.

    A node has to be offered when it becomes one that can be evicted, and again when its score has
    fallen; that it has risen or that the node is gone is noticed here.
    """

    def __init__(
        self, score: Callable[[Node], float], is_evictable: Callable[[Node], bool]
    ) -> None:
        self._score = score
        self._is_evictable = is_evictable
        self._heap: list[tuple[float, int, Node]] = []
        self._offered: dict[Node, float] = {}
        self._serial = count()
        self._limit = 64

    def offer(self, node: Node) -> None:
        if self._is_evictable(node):
            score = self._score(node)
            if self._offered.get(node) != score:
                self._offered[node] = score
                heappush(self._heap, (score, next(self._serial), node))
                self._compact()

    def take(self, is_free: Callable[[Node], bool]) -> Generator[Node, None, None]:
        """Victims, one after another; those that are not free at the moment stay offered.

        The tree may change between two of them.
        """
        passed: list[Node] = []
        try:
            while self._heap:
                score, _, node = heappop(self._heap)
                if self._offered.get(node) != score:
                    continue
                del self._offered[node]
                if not self._is_evictable(node):
                    continue
                if self._score(node) > score:
                    self.offer(node)
                elif is_free(node):
                    yield node
                else:
                    passed.append(node)
        finally:
            for node in passed:
                self.offer(node)

    def _compact(self) -> None:
        """Drops what is outdated or gone, whenever the heap has doubled."""
        if len(self._heap) > self._limit:
            self._offered = {n: s for n, s in self._offered.items() if self._is_evictable(n)}
            self._heap = [entry for entry in self._heap if self._offered.get(entry[2]) == entry[0]]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64


class Scores:
    """The larger, the longer it is kept."""

    def __init__(self, cost: CostModel, chances: Chances, *, alpha: float, page_len: int) -> None:
        self._cost = cost
        self._chances = chances
        self._alpha = alpha
        self._page_bytes = page_len * cost.row_bytes

    def of_state(self, node: Node) -> float:
        return node.state_used + self._alpha * self._value(node, self._cost.state_bytes)

    def of_leaf(self, node: Node) -> float:
        num_bytes = len(node.pages or ()) * self._page_bytes
        if node.slot is not None:
            num_bytes += self._cost.state_bytes
        used = max(node.rows_used, node.state_used)
        return used + self._alpha * self._value(node, num_bytes)

    def _value(self, node: Node, num_bytes: float) -> float:
        before = node.parent
        while before is not None and before.parent is not None and not before.has_state:
            before = before.parent
        start = 0 if before is None else before.end
        saved = self._cost.saved_per_byte(start, node.end, num_bytes)
        return math.log(saved * self._chances.of(node.reason, node.num_hits))
