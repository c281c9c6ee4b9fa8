"""The radix tree with rows and states hanging off it, and the references it holds in both pools.

What always holds:

- A node's rows are on the card or off it, all of them. Rows on the card start at the root: the
  parent of a node on the card is on the card.
- A page that spans the end of a node and the start of its child is held by both, or the child has
  a copy of its own, which then counts: of a path, the deepest node's page is valid.
- A node without children has a state. Rows behind the last state serve nobody and are given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from perilune.engine.pages import PagePool
from perilune.engine.radix_tree import Node, RadixTree
from perilune.engine.slots import SlotPool
from perilune.engine.stored import Stored


class CachedTree(RadixTree):
    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        page_len: int,
        forget: Callable[[Stored], None],
    ) -> None:
        """`forget` hears of what is not needed off the card any more."""
        super().__init__()
        self.page_len = page_len
        self.on_leaf: Callable[[Node], None] = lambda node: None
        """Hears of a node whose last child on the card has left it."""
        self._pages = pages
        self._slots = slots
        self._forget = forget
        self._held = [0] * pages.size
        self.owner: dict[Stored, Node] = {}
        """The node of every piece off the card."""

    def page_range(self, node: Node) -> range:
        """Indices, within a sequence, of the pages that hold a token of the edge."""
        return range(node.start // self.page_len, -(-node.end // self.page_len))

    def page_table(self, path: Sequence[Node]) -> list[int]:
        """Pages of all rows before the end of a path on the card."""
        table: list[int] = []
        for node in path:
            assert node.pages is not None
            del table[node.start // self.page_len :]
            table += node.pages
        return table

    def is_used_elsewhere(self, node: Node) -> bool:
        """Whether giving up the node's pages would leave some of them with another holder."""
        return any(self._pages.count(page) > self._held[page] for page in node.pages or ())

    def insert(self, tokens: np.ndarray, table: Sequence[int]) -> tuple[list[Node], int]:
        """The path of `tokens`, all of it on the card, and how many were there before.

        Rows that are not, are taken from `table`, the page table of a sequence that begins so.
        """
        path, node, inside, num_matched = self.walk(tokens)
        num_known = max((known.end for known in path if known.pages is not None), default=0)
        for known in path:
            if known.pages is None:
                self.give_rows(known, self._part(known, table))
        if inside is not None:
            num_known = num_matched if inside.pages is not None else num_known
            node = self._cut(inside, num_matched, table)
            path.append(node)
        if num_matched < len(tokens):
            path.append(self.attach(node, tokens[num_matched:]))
            self.give_rows(path[-1], self._part(path[-1], table))
        return path, num_known

    def give_rows(self, node: Node, pages: Sequence[int]) -> None:
        """Takes a reference to each of the node's pages; what is off the card is forgotten."""
        assert node.pages is None
        assert node.parent is not None
        node.pages = list(pages)
        self._hold(node.pages)
        node.parent.num_children_on_card += 1
        self._forget_rows(node)

    def give_state(self, node: Node, slot: int) -> None:
        """Takes over the caller's reference."""
        assert node.slot is None
        node.slot = slot
        self._forget_state(node)

    def store_rows(self, node: Node, stored: Stored) -> None:
        """The rows have been copied off the card: gives the pages up."""
        self._drop_pages(node)
        node.rows = stored
        self.owner[stored] = node

    def store_state(self, node: Node, stored: Stored) -> None:
        self.drop_state(node)
        node.state = stored
        self.owner[stored] = node

    def drop_state(self, node: Node) -> None:
        """Gives the state up, wherever it is; `prune` has to follow."""
        if node.slot is not None:
            self._slots.release([node.slot])
            node.slot = None
        self._forget_state(node)

    def drop_below(self, node: Node) -> None:
        """Takes the node and all below it out, whatever they hold, and what this makes useless."""
        for below in reversed(list(self.nodes(node))):
            self._take_out(below)
        self.prune(self._take_out(node))

    def lose(self, stored: Stored) -> None:
        """What was off the card is gone, and with it what cannot be used without."""
        node = self.owner[stored]
        if node.state is stored:
            self.drop_state(node)
            self.prune(node)
        else:
            self.drop_below(node)

    def prune(self, node: Node) -> None:
        """Takes the node out if it serves nobody, then looks at its parent."""
        while node.parent is not None and not node.children and not node.has_state:
            node = self._take_out(node)

    def check(self) -> None:
        super().check()
        held: Counter[int] = Counter()
        owned = {}
        for node in self.nodes():
            assert node.parent is not None
            assert (node.pages is None) != (node.rows is None), "rows on the card or off it"
            assert node.slot is None or node.state is None, "a state on the card or off it"
            assert node.children or node.has_state, "rows without use"
            on_card = sum(child.pages is not None for child in node.children.values())
            assert node.num_children_on_card == on_card
            if node.pages is not None:
                assert node.parent is self.root or node.parent.pages is not None
                assert len(node.pages) == len(self.page_range(node))
                held.update(node.pages)
            else:
                assert node.slot is None, "a state on the card without rows"
            owned |= {stored: node for stored in (node.rows, node.state) if stored is not None}
        assert owned == self.owner
        assert {page: n for page, n in enumerate(self._held) if n} == held

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """How often the tree holds each page and each slot."""
        slots = Counter(node.slot for node in self.nodes() if node.slot is not None)
        return Counter({page: n for page, n in enumerate(self._held) if n}), slots

    def _cut(self, node: Node, at: int, table: Sequence[int]) -> Node:
        """As `split`. Off the card, the new node is given its rows in `table` instead."""
        head = self.split(node, at)
        if node.pages is None:
            # The rest keeps the stored pages, of which it will ask for its own.
            self.give_rows(head, self._part(head, table))
            return head
        whole = node.pages
        head.pages = whole[: len(self.page_range(head))]
        node.pages = whole[-len(self.page_range(node)) :]
        head.num_children_on_card = 1
        if at % self.page_len:
            self._hold([node.pages[0]])
        return head

    def _part(self, node: Node, table: Sequence[int]) -> Sequence[int]:
        """The node's pages in the page table of a sequence."""
        span = self.page_range(node)
        return table[span.start : span.stop]

    def _take_out(self, leaf: Node) -> Node:
        leaf.pinned_until_s = -np.inf
        self.drop_state(leaf)
        if leaf.pages is not None:
            self._drop_pages(leaf)
        self._forget_rows(leaf)
        return self.detach(leaf)

    def _drop_pages(self, node: Node) -> None:
        assert node.pages is not None
        assert node.parent is not None
        for page in node.pages:
            self._held[page] -= 1
        self._pages.release(node.pages)
        node.pages = None
        node.parent.num_children_on_card -= 1
        if node.parent.num_children_on_card == 0:
            self.on_leaf(node.parent)

    def _hold(self, pages: Sequence[int]) -> None:
        self._pages.share(pages)
        for page in pages:
            self._held[page] += 1

    def _forget_rows(self, node: Node) -> None:
        if node.rows is not None:
            del self.owner[node.rows]
            self._forget(node.rows)
            node.rows = None

    def _forget_state(self, node: Node) -> None:
        if node.state is not None:
            del self.owner[node.state]
            self._forget(node.state)
            node.state = None
