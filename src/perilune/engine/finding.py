"""What of a walk down the tree can be used, and where it could have been more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perilune.engine.cached_tree import CachedTree
from perilune.engine.hit import Deeper
from perilune.engine.off_card import OffCard
from perilune.engine.radix_tree import Node, Walk


def usable(path: Sequence[Node]) -> Sequence[Node]:
    """Down to the last state on the card; the rows before it then are there too."""
    return _down_to(path, lambda node: node.slot is not None)


def down_to_state(path: Sequence[Node]) -> Sequence[Node]:
    """Down to the last state, wherever it is."""
    return _down_to(path, lambda node: node.has_state)


def branch_points(walk: Walk, num_usable: int) -> tuple[int, ...]:
    """Behind the first `num_usable` nodes of the path: where others have left the known tokens, and
    where this prompt does."""
    forks = {
        node.end for node in walk.path[num_usable:] if node.slot is None and len(node.children) > 1
    }
    if walk.num_matched > (walk.path[num_usable - 1].end if num_usable else 0):
        forks.add(walk.num_matched)
    return tuple(sorted(forks))


def deeper(
    path: Sequence[Node], num_usable: int, tree: CachedTree, off_card: OffCard | None
) -> Deeper | None:
    """A state behind the usable part of the path that could be brought to the card."""
    target = down_to_state(path)
    if off_card is None or len(target) <= num_usable:
        return None
    missing = [node for node in target if node.pages is None]
    stored = [*(node.rows for node in missing), target[-1].state]
    if not off_card.can_prepare([entry for entry in stored if entry is not None]):
        return None
    num_pages = sum(len(tree.page_range(node)) for node in missing)
    return Deeper(target[-1].end, num_pages, int(target[-1].slot is None))


def _down_to(path: Sequence[Node], is_end: Callable[[Node], bool]) -> Sequence[Node]:
    for depth in range(len(path), 0, -1):
        if is_end(path[depth - 1]):
            return path[:depth]
    return ()
