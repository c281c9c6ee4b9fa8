"""Back to the card: a prefix whose rows or state were moved off it."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.engine.cached_tree import CachedTree
from perilune.engine.errors import PoolFullError
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.radix_tree import Node
from perilune.engine.slots import SlotPool


def restore(
    path: Sequence[Node], tree: CachedTree, off_card: OffCard, pages: PagePool, slots: SlotPool
) -> bool:
    """Brings a path that ends with a state to the card.

    False: a part is still being read. What turns out to be lost or damaged is taken out of the
    tree, and the rest stays as it is.

    Raises:
        PoolFullError: nothing has changed.
    """
    missing = [node for node in path if node.pages is None]
    stored = [node.rows for node in missing if node.rows is not None]
    stored += [node.state for node in path[-1:] if node.state is not None]
    if not off_card.prepare(stored):
        return False
    num_pages = sum(len(tree.page_range(node)) for node in missing)
    if num_pages > pages.num_free:
        raise PoolFullError(pages.kind, wanted=num_pages, free=pages.num_free)
    if slots.num_free == 0 and path[-1:] and path[-1].slot is None:
        raise PoolFullError(slots.kind, wanted=1, free=0)
    for node in missing:
        if not _restore_rows(node, tree, off_card, pages):
            tree.drop_below(node)
            return True
    for node in path[-1:]:
        if node.slot is None and not _restore_state(node, tree, off_card, slots):
            tree.drop_state(node)
            tree.prune(node)
    return True


def _restore_rows(node: Node, tree: CachedTree, off_card: OffCard, pages: PagePool) -> bool:
    span = tree.page_range(node)
    fresh = pages.allocate(len(span))
    assert node.rows is not None
    is_whole = off_card.write_pages(node.rows, span.start, fresh)
    if is_whole:
        tree.give_rows(node, fresh)
    pages.release(fresh)
    return is_whole


def _restore_state(node: Node, tree: CachedTree, off_card: OffCard, slots: SlotPool) -> bool:
    [fresh] = slots.allocate(1)
    assert node.state is not None
    is_whole = off_card.write_state(node.state, fresh)
    if is_whole:
        tree.give_state(node, fresh)
    else:
        slots.release([fresh])
    return is_whole
