"""The memory of all sequences: both pools, the cache of what they leave, and the tensors.

Not thread-safe: whoever schedules owns it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from perilune.engine.errors import PoolFullError
from perilune.engine.holding import Holding
from perilune.engine.pages import PagePool
from perilune.engine.sequence import TokenSequence
from perilune.engine.slots import SlotPool
from perilune.engine.step_model import StepModel


class Room(NamedTuple):
    """Sizes of the pools."""

    pages: int
    """Page 0 included, which no sequence gets."""
    slots: int


class PooledMemory:
    """Gives a sequence a slot and pages, and takes them back."""

    def __init__(self, model: StepModel, room: Room) -> None:
        self.pages = PagePool(room.pages)
        self.slots = SlotPool(room.slots)
        self.pools = model.new_pools(slots=room.slots, pages=room.pages)
        self._page_len = model.page_len

    @property
    def used_bytes(self) -> int:
        used = self.pages.num_used * self.pools.page_nbytes
        return used + self.slots.num_used * self.pools.slot_nbytes

    @property
    def max_tokens(self) -> int:
        """Of a sequence that has all pages for itself."""
        return self.pages.capacity * self._page_len

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_len)

    def start(self, sequence: TokenSequence, num_reserved: int) -> bool:
        """Gives a slot, if one is free and so are pages for all of its known tokens, apart from
        `num_reserved` pages that others will need."""
        wanted = self.num_pages(sequence.num_tokens) + num_reserved
        if not self._make_room(wanted, 1):
            return False
        [slot] = self.slots.allocate(1)
        sequence.held = Holding(slot=slot, pages=array("i"))
        return True

    def grow(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Gives pages for the first `num_tokens` tokens; False: they are not to be had."""
        held = _held(sequence)
        missing = self.num_pages(num_tokens) - len(held.pages)
        if missing > 0:
            if not self._make_room(missing, 0):
                return False
            held.pages.extend(self.pages.allocate(missing))
        return True

    def num_missing(self, sequence: TokenSequence) -> int:
        """Pages that its known tokens still need."""
        return self.num_pages(sequence.num_tokens) - len(_held(sequence).pages)

    def forget(self) -> None:
        """Gives up whatever no sequence holds."""

    def release(self, sequence: TokenSequence) -> None:
        """Takes all back; a sequence that holds nothing is left alone."""
        held = sequence.held
        if held is not None:
            sequence.held = None
            self.pages.release(held.pages)
            self.slots.release([held.slot, *(c.slot for c in held.checkpoints)])

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Asserts that exactly what `sequences` hold is in use."""
        pages: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for sequence in sequences:
            if sequence.held is not None:
                assert len(sequence.held.pages) >= self.num_pages(sequence.num_computed)
                pages.update(sequence.held.pages)
                slots.update([sequence.held.slot, *(c.slot for c in sequence.held.checkpoints)])
        self.pages.check(pages)
        self.slots.check(slots)

    def _make_room(self, num_pages: int, num_slots: int) -> bool:
        return self.pages.num_free >= num_pages and self.slots.num_free >= num_slots

    def refuse(self, num_tokens: int) -> None:
        """Raises PoolFullError for a sequence that would not fit if it were alone."""
        if num_tokens > self.max_tokens:
            wanted = self.num_pages(num_tokens)
            raise PoolFullError("page", wanted=wanted, free=self.pages.capacity)


def _held(sequence: TokenSequence) -> Holding:
    assert sequence.held is not None
    return sequence.held
