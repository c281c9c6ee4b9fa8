"""Pools in plain Python, in which every row and state tells the prefix that made it.

Legend: P pages, B tokens of a page, N sequences that decode, J pages of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from perilune.model.step import NO_SLOT, Cut, Decoding, Pages, Prefilling

POISON = -(2**62)
"""What freed and never written rows hold."""


class FakeState(NamedTuple):
    """Of a slot. Both lists grow in place; a copy has its own."""

    ids: list[int]
    """Every token seen, in order."""
    tags: list[int]
    """One number for each prefix of these."""

    def copy(self) -> FakeState:
        return FakeState(self.ids.copy(), self.tags.copy())

    def see(self, token_id: int) -> int:
        """Takes a token in; the tag of the row that it leaves."""
        before = self.tags[-1] if self.tags else 1
        self.ids.append(token_id)
        self.tags.append((before * 1_000_003 + token_id + 7) % (2**61 - 1))
        return self.tags[-1]


class Fed(NamedTuple):
    """A sequence of a step."""

    slot: int
    pages: Pages
    length: int
    """Tokens that it has seen before the step."""
    num_new: int
    cuts: Sequence[Cut]
    num_logits: int
    is_decoding: bool
    is_draft: bool = False
    """Only reads the state."""


def check_slots(fed: Sequence[Fed]) -> None:
    written = [s.slot for s in fed] + [cut.slot for s in fed for cut in s.cuts]
    assert len(set(written)) == len(written), f"a slot is written by two: {written}"
    assert min(written) > NO_SLOT


class FakeDecodeStep(NamedTuple):
    """Of tensors that are read when the model runs."""

    slot_N: Tensor
    table_NJ: Tensor
    length_N: Tensor
    row_T: Tensor
    keep_N: Tensor | None

    @property
    def num_each(self) -> int:
        return len(self.row_T) // len(self.slot_N)

    def fed(self, page_len: int) -> list[Fed | None]:
        """What each sequence is; None: it is inert."""
        assert self.keep_N is None or not self.keep_N.any(), "a step that verifies keeps nothing"
        rows = self.row_T.view(len(self.slot_N), -1)
        columns = (x.tolist() for x in (self.slot_N, self.length_N, rows))
        return [
            self._fed(i, slot, length, rows, page_len)
            for i, (slot, length, rows) in enumerate(zip(*columns, strict=True))
        ]

    def _fed(self, i: int, slot: int, length: int, rows: list[int], page_len: int) -> Fed | None:
        if slot == NO_SLOT:
            assert not any([length, *rows]), f"{i} is inert, but of {length} tokens, to {rows}"
            return None
        each = len(rows)
        pages = self.table_NJ[i, : -(-length // page_len)].tolist()
        new = range(length - each, length)
        to = [pages[t // page_len] * page_len + t % page_len for t in new]
        assert rows == to, f"{i} goes to {rows} instead of {to}"
        return Fed(slot, pages, new.start, each, (), each, True, self.keep_N is not None)


class FakePools:
    def __init__(self, *, slots: int, pages: int, page_len: int) -> None:
        self.page_len = page_len
        self.row_PB = np.full((pages, page_len), POISON, np.int64)
        self.states: list[FakeState | None] = [None] * slots

    @property
    def slot_nbytes(self) -> int:
        return 64

    @property
    def page_nbytes(self) -> int:
        return self.row_PB[0].nbytes

    def step(
        self,
        decoding: Sequence[Decoding],
        prefilling: Sequence[Prefilling] = (),
        *,
        num_each: int = 1,
        verify: bool = False,
    ) -> list[Fed]:
        each = num_each
        fed = [
            Fed(s.slot, s.pages, s.num_tokens - each, each, (), each, True, verify)
            for s in decoding
        ]
        fed += [Fed(*s[:5], s.num_logits, False) for s in prefilling]
        check_slots(fed)
        return fed

    def decode_step(
        self,
        slot_N: Tensor,
        table_NJ: Tensor,
        length_N: Tensor,
        row_T: Tensor,
        keep_N: Tensor | None = None,
    ) -> FakeDecodeStep:
        return FakeDecodeStep(slot_N, table_NJ, length_N, row_T, keep_N)

    def feed(self, fed: Fed, token_ids: Sequence[int]) -> list[int]:
        """Computes a sequence's part of a step; all of its tokens. Rows of a draft are written.

        Raises:
            ValueError: the slot or a page holds what is not this sequence's.
        """
        state = self._state(fed)
        if fed.is_draft:
            state = state.copy()
        cuts = {cut.after: cut.slot for cut in fed.cuts}
        for count, token_id in enumerate(token_ids, 1):
            page, row = divmod(len(state.ids), self.page_len)
            self.row_PB[fed.pages[page], row] = state.see(token_id)
            if count in cuts:
                self.states[cuts[count]] = state.copy()
        if not fed.is_draft:
            self.states[fed.slot] = state
        return state.ids

    def accept(self, fed: Fed, token_ids: Sequence[int]) -> None:
        """Moves the state of a draft's sequence on by the first tokens of it; one whose slot has
        been freed meanwhile is left alone."""
        state = self.states[fed.slot]
        if state is not None:
            for token_id in token_ids:
                state.see(token_id)

    def _state(self, fed: Fed) -> FakeState:
        if not fed.length and not fed.is_decoding:
            return FakeState([], [])
        state = self.states[fed.slot]
        if state is None or len(state.ids) != fed.length:
            raise ValueError(f"slot {fed.slot} holds no state after {fed.length} tokens")
        pages = np.asarray(fed.pages[: -(-fed.length // self.page_len)], np.int64)
        if (self.row_PB[pages].reshape(-1)[: fed.length] != np.array(state.tags)).any():
            raise ValueError(f"pages {pages} do not hold the rows of {state.ids}")
        return state

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        copies = [self.states[source] for source, _ in pairs]
        for (_, target), state in zip(pairs, copies, strict=True):
            self.states[target] = None if state is None else state.copy()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        copies = [self.row_PB[source].copy() for source, _ in pairs]
        for (_, target), row_B in zip(pairs, copies, strict=True):
            self.row_PB[target] = row_B

    def poison_pages(self, pages: Sequence[int]) -> None:
        self.row_PB[list(pages)] = POISON

    def poison_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.states[slot] = None
