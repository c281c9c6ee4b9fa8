"""A tree of token sequences in which shared prefixes are stored once.

Every node stands for the tokens from the root to its `end`; its edge holds those from `start` on.
Prefixes match token by token, exactly: nothing is hashed. What hangs off a node (rows of latents, a
state) belongs to `prefix_cache`.

Edges are compared as arrays: a walk costs one comparison of the tokens and a little a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perilune.engine.chances import Reason
from perilune.engine.stored import Stored

TokenIds = Sequence[int] | np.ndarray


def as_tokens(token_ids: TokenIds) -> np.ndarray:
    """int32 [tokens]; an array of that kind is taken as it is, so that it can be made only once."""
    return np.asarray(token_ids, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """Compared by identity. `end == 0` is the root alone."""

    tokens: np.ndarray
    """The edge; its own memory, never a view of a caller's."""
    start: int
    """Tokens before the edge."""
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By the first token of their edge."""

    pages: list[int] | None = None
    """On the card: all pages that hold a token of the edge, in order. Where the edge begins inside
    of a page, that page holds the rows before it as well."""
    rows: Stored | None = None
    """Off the card: the same pages. A node other than the root has exactly one of the two."""
    slot: int | None = None
    """On the card: the state after `end` tokens."""
    state: Stored | None = None
    """Off the card: the same."""
    num_children_on_card: int = 0

    reason: Reason = "branch"
    """Why the state was kept."""
    num_hits: int = 0
    """Of the state."""
    rows_used: float = 0.0
    state_used: float = 0.0
    """When rows and state last served somebody, on the cache's own scale (see `eviction`)."""
    pinned_until_s: float = -np.inf

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def has_state(self) -> bool:
        return self.slot is not None or self.state is not None


class Walk(NamedTuple):
    path: list[Node]
    """Nodes whose whole edge matches, from the root's child down."""
    node: Node
    """The last of them, or the root."""
    inside: Node | None
    """A child of `node` whose edge matches in part."""
    num_matched: int


class RadixTree:
    def __init__(self) -> None:
        self.root = Node(np.empty(0, np.int32), 0, None)
        self.num_nodes = 0

    def walk(self, tokens: np.ndarray) -> Walk:
        """How far `tokens` match."""
        path, node, matched = [], self.root, 0
        while matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            same = _common_prefix(child.tokens, tokens[matched : matched + len(child.tokens)])
            matched += same
            if same < len(child.tokens):
                return Walk(path, node, child, matched)
            path.append(child)
            node = child
        return Walk(path, node, None, matched)

    def split(self, node: Node, at: int) -> Node:
        """Cuts the edge so that a new node ends at `at` tokens; returns it, the parent of `node`.

        What hangs off `node` stays there, but the new node is as recent.
        """
        cut = at - node.start
        assert 0 < cut < len(node.tokens)
        head = Node(node.tokens[:cut].copy(), node.start, node.parent, rows_used=node.rows_used)
        head.children[int(node.tokens[cut])] = node
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = head
        node.tokens, node.start, node.parent = node.tokens[cut:].copy(), at, head
        self.num_nodes += 1
        return head

    def attach(self, parent: Node, tokens: np.ndarray) -> Node:
        """A new leaf below `parent`, none of whose children begins with the same token."""
        assert int(tokens[0]) not in parent.children
        leaf = Node(tokens.copy(), parent.end, parent)
        parent.children[int(tokens[0])] = leaf
        self.num_nodes += 1
        return leaf

    def detach(self, leaf: Node) -> Node:
        """Takes a node without children out; returns its parent."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        self.num_nodes -= 1
        return parent

    def nodes(self, below: Node | None = None) -> Iterator[Node]:
        """All nodes but the root (or all below a node), parents first."""
        stack = list((below or self.root).children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> None:
        """Asserts that edges fit together."""
        assert self.root.end == 0
        count = 0
        for node in self.nodes():
            count += 1
            assert node.parent is not None
            assert len(node.tokens) > 0
            assert node.start == node.parent.end
            assert node.parent.children[int(node.tokens[0])] is node
        assert count == self.num_nodes


def path_of(node: Node) -> list[Node]:
    """From the root's child down to `node`; empty for the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num
