"""The memory of all sequences: both pools, the cache of what they leave, and the tensors.

Not thread-safe: whoever schedules owns it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from perilune.engine.cache_tiers import Tiers
from perilune.engine.chances import Reason
from perilune.engine.cost_model import CostModel
from perilune.engine.errors import PoolFullError
from perilune.engine.hit import Hit
from perilune.engine.holding import Checkpoint, Holding
from perilune.engine.off_card import OffCard
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.retention import Retention, cuts
from perilune.engine.sequence import TokenSequence
from perilune.engine.slots import SlotPool
from perilune.engine.step_model import StepModel
from perilune.model.step import Cut


class Room(NamedTuple):
    """Sizes of the pools."""

    pages: int
    """Page 0 included, which no sequence gets."""
    slots: int


class Started(Enum):
    YES = auto()
    NO_ROOM = auto()
    COMING = auto()
    """What is cached of its tokens is on its way back to the card."""


class PooledMemory:
    """Gives a sequence a slot and pages, and takes them back."""

    def __init__(
        self,
        model: StepModel,
        room: Room,
        cost: CostModel | None,
        retention: Retention,
        tiers: Tiers | None = None,
    ) -> None:
        """`cost` weighs what the prefix cache keeps; None: there is none."""
        self.pages = PagePool(room.pages)
        self.slots = SlotPool(room.slots)
        self.pools = model.new_pools(slots=room.slots, pages=room.pages)
        self.retention = retention
        self.hit_tokens = 0
        """Prompt tokens that did not have to be computed."""
        self._page_len = model.page_len
        self.cache: PrefixCache | None = None
        self.off_card: OffCard | None = None
        self.restoring: TokenSequence | None = None
        """Whose cached tokens are being read from disk: one sequence's at a time, or each could
        take the host's memory from the other for ever."""
        if cost is not None:
            self.off_card = None if tiers is None else tiers(self.pools)
            self.cache = PrefixCache(
                self.pages,
                self.slots,
                page_len=model.page_len,
                cost=cost,
                off_card=self.off_card,
            )

    @property
    def used_bytes(self) -> int:
        """By sequences, and by what is kept of those that have ended."""
        used = self.pages.num_used * self.pools.page_nbytes
        return used + self.slots.num_used * self.pools.slot_nbytes

    @property
    def max_tokens(self) -> int:
        """Of a sequence that has all pages for itself."""
        return self.pages.capacity * self._page_len

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_len)

    def start(self, sequence: TokenSequence, num_reserved: int) -> Started:
        """Gives a slot, if one is free and so are pages for all of its known tokens, apart from
        `num_reserved` pages that others will need. What is cached of its tokens counts as computed.
        """
        hit = self._look_up(sequence, num_reserved)
        if hit is None:
            return Started.COMING
        wanted = self.num_pages(sequence.num_tokens) - len(hit.pages) + num_reserved
        if not self._make_room(wanted, 1):
            if self.cache is not None:
                self.cache.drop(hit)
            return Started.NO_ROOM
        [slot] = self.slots.allocate(1)
        held = sequence.held = Holding(
            slot=slot,
            pages=array("i", hit.pages),
            num_known=sequence.num_tokens,
            num_cached=hit.num_tokens,
        )
        if self.cache is not None:
            self._take_over(hit, held)
            sequence.num_computed = hit.num_tokens
            self.hit_tokens += sequence.count_prompt(hit.num_tokens, is_cached=True)
            held.cuts = cuts(sequence.prompt_len, hit.num_tokens, hit.branch_points, self.retention)
        return Started.YES

    def _look_up(self, sequence: TokenSequence, num_reserved: int) -> Hit | None:
        """None: more is cached off the card, and is being read; ask again in a later step."""
        if self.cache is None:
            return Hit()
        if self.restoring is sequence:
            self.restoring = None
        tokens = sequence.ids(sequence.num_tokens)
        hit = self.cache.lookup(tokens)
        deeper = hit.deeper
        if deeper is None or deeper.num_tokens - hit.num_tokens < self.retention.min_gap:
            return hit
        if self.restoring is not None:
            self.cache.drop(hit)
            return None
        # A page that the prefix ends inside of is there twice afterwards.
        wanted = self.num_pages(sequence.num_tokens) - len(hit.pages) + num_reserved + 1
        if not self._make_room(wanted, deeper.num_slots + 1):
            return hit
        self.cache.drop(hit)
        try:
            is_done = self.cache.bring_back(tokens)
        except PoolFullError:
            is_done = True  # making room has moved more of it off the card: it is not worth more
        if not is_done:
            self.restoring = sequence
            return None
        return self.cache.lookup(tokens)

    def poll(self) -> None:
        """Takes note of what has moved between host and disk; once a step."""
        if self.cache is not None:
            self.cache.poll()

    def wait(self) -> None:
        """Returns when something more has been read from disk, if a sequence waits for that."""
        if self.restoring is not None and self.off_card is not None:
            self.off_card.wait()

    def close(self) -> None:
        """Removes what is on disk. Nothing is cached any more."""
        off_card, self.off_card = self.off_card, None
        if off_card is not None:
            off_card.close()

    def _take_over(self, hit: Hit, held: Holding) -> None:
        """Copies what the sequence will write over. The copies are enqueued before the step."""
        assert self.cache is not None
        if hit.slot is not None:
            self.pools.copy_slots([(hit.slot, held.slot)])
        if hit.partial_page is not None:
            held.pages.extend(self.pages.allocate(1))
            self.pools.copy_pages([(hit.partial_page, held.pages[-1])])
        self.cache.settle(hit)

    def checkpoint(self, sequence: TokenSequence, num_new: int) -> list[Cut]:
        """Where the next `num_new` tokens leave states, each in a slot of its own. A state that no
        slot is to be had for is not kept."""
        held, start = _held(sequence), sequence.num_computed
        due = [cut for cut in held.cuts if cut.num_tokens <= start + num_new]
        del held.cuts[: len(due)]
        for cut in due:
            if self._make_room(0, 1):
                held.checkpoints.append(Checkpoint(cut, *self.slots.allocate(1)))
        return [Cut(point.cut.num_tokens - start, point.slot) for point in held.checkpoints]

    def publish(self, sequence: TokenSequence) -> None:
        """The states that the last step has left: others can go on from there."""
        held = _held(sequence)
        if held.checkpoints:
            assert self.cache is not None
            tokens = sequence.ids(held.checkpoints[-1].cut.num_tokens)
            for cut, slot in held.checkpoints:
                new = self.cache.publish(tokens, cut.num_tokens, held.pages, slot, cut.reason)
                sequence.written.note(cut.num_tokens, new)
            held.checkpoints = []

    def pin(self, sequence: TokenSequence) -> None:
        """Keeps what is cached of its prompt for as long as its request asks for."""
        request = sequence.request
        if self.cache is not None and request.pin_s is not None:
            pinned = self.cache.pin(sequence.ids(sequence.prompt_len), request.pin_s)
            sequence.num_pinned = 0 if pinned is None else pinned.num_tokens

    def keep(self, sequence: TokenSequence, reason: Reason = "answer") -> None:
        """Takes all back, but what it has computed stays cached: the sequence itself or a longer
        one can go on from there."""
        held, num_tokens = _held(sequence), sequence.num_computed
        if self.cache is None or num_tokens == 0:
            self.release(sequence)
            return
        assert not held.checkpoints, "the step that leaves them has not ended"
        sequence.held = None
        tokens = sequence.ids(num_tokens)
        new = self.cache.publish(tokens, num_tokens, held.pages, held.slot, reason)
        sequence.written.note(num_tokens, new)
        self.pages.release(held.pages)

    def disown(self, sequence: TokenSequence) -> None:
        """Takes all back after logits that were not finite, and what it has left in the cache, some
        of which may be as broken. So may the state that it began with, if no token came of it."""
        held, states = sequence.held, sequence.written.states
        if held is not None and held.num_known == sequence.num_tokens:
            states = states | {held.num_cached}
        if self.cache is not None:
            tokens = sequence.ids(sequence.num_tokens)
            self.cache.forget(tokens, sequence.written.first_row, states)
        self.release(sequence)

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
        return max(self.num_pages(sequence.num_tokens) - len(_held(sequence).pages), 0)

    def squeeze(self) -> None:
        """For a sequence that nobody is left to take memory from: gives up pins, too, or, where
        that frees nothing, whatever no sequence holds."""
        if self.cache is not None:
            self.cache.unpin()
            freed = self.cache.evict(self.pages.capacity, self.slots.capacity)
            if not (freed.num_pages or freed.num_slots):
                self.forget()

    def forget(self) -> None:
        """Gives up whatever no sequence holds."""
        if self.cache is not None:
            self.cache.clear()

    def release(self, sequence: TokenSequence) -> None:
        """Takes all back, and what it waits for is not waited for any more."""
        held = sequence.held
        if self.restoring is sequence:
            self.restoring = None
        if held is not None:
            sequence.held = None
            self.pages.release(held.pages)
            self.slots.release([held.slot, *(c.slot for c in held.checkpoints)])

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Asserts that exactly what `sequences` hold, and what is cached, is in use."""
        pages: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for sequence in sequences:
            if sequence.held is not None:
                assert len(sequence.held.pages) >= self.num_pages(sequence.num_computed)
                pages.update(sequence.held.pages)
                slots.update([sequence.held.slot, *(c.slot for c in sequence.held.checkpoints)])
        if self.cache is not None:
            self.cache.check(pages, slots)
        else:
            self.pages.check(pages)
            self.slots.check(slots)

    def _make_room(self, num_pages: int, num_slots: int) -> bool:
        if self.cache is not None:
            return self.cache.make_room(num_pages, num_slots)
        return self.pages.num_free >= num_pages and self.slots.num_free >= num_slots

    def refuse(self, num_tokens: int) -> None:
        """Raises PoolFullError for a sequence that would not fit if it were alone."""
        if num_tokens > self.max_tokens:
            wanted = self.num_pages(num_tokens)
            raise PoolFullError("page", wanted=wanted, free=self.pages.capacity)


def _held(sequence: TokenSequence) -> Holding:
    assert sequence.held is not None
    return sequence.held
