"""What a lookup finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perilune.engine.radix_tree import Node


class Deeper(NamedTuple):
    """A longer prefix that is cached, but in part off the card."""

    num_tokens: int
    num_pages: int
    """Pages that `PrefixCache.bring_back` allocates."""
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hit:
    """A cached prefix, held: nothing it names is freed or written until it is settled or dropped.

    One length serves both pools: a state after exactly `num_tokens`, and the rows before it.
    """

    num_tokens: int = 0
    """0: a miss, which names nothing."""
    pages: tuple[int, ...] = ()
    """The full pages, in order: to be shared by reference, never to be written."""
    partial_page: int | None = None
    """Its first `num_tokens % page_len` rows belong to the prefix and are to be copied into a page
    of the sequence's own; None: the prefix ends with a page."""
    slot: int | None = None
    """The state, to be copied into the sequence's own slot; None: a miss."""
    branch_points: tuple[int, ...] = ()
    """Token counts, rising and beyond `num_tokens`, up to which the prompt is known, without a
    state on the card: had one been kept there, this lookup (or another) would have found more."""
    deeper: Deeper | None = None


class Held(NamedTuple):
    """What an open hit has references to."""

    path: Sequence[Node]
    table: list[int]
    """Its pages, the partial one included."""
    slots: list[int]
