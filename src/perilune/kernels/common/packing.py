"""How documents lie in a packed batch of T tokens.

Legend: T packed tokens, B rows, L tokens of a row, N sequences.

Two layouts share one class. `Packing.of(lengths)` puts N sequences one after another (inference).
`Packing.rows(segment_BL)` is a dense block of B rows in which `segment_BL` numbers the documents
(training: static shapes, no lengths on the host). Ops work on rows; `to_rows` and `from_rows`
translate, and are views whenever no padding is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Cuts = tuple[tuple[int, ...], ...]
"""Of every sequence, rising numbers of its tokens after which the state is wanted as well."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    lengths: tuple[int, ...]
    """Tokens of each sequence (or of each row, when `segment_BL` is given)."""
    segment_BL: Tensor | None = None
    """Document number of every token; equal neighbours belong together, every row starts afresh."""

    @staticmethod
    def of(lengths: Sequence[int]) -> Packing:
        """N sequences back to back; one without a token keeps its state.

        Raises:
            ValueError: no sequence, or a negative length.
        """
        if not lengths or min(lengths) < 0:
            raise ValueError(f"a pack is one or more lengths from 0 up, not {list(lengths)}")
        return Packing(lengths=tuple(lengths))

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Sequence[int]) -> Packing:
        """From the N+1 running offsets of variable-length attention kernels."""
        return Packing.of([end - start for start, end in pairwise(cu_seqlens)])

    @staticmethod
    def rows(segment_BL: Tensor) -> Packing:
        b, length = segment_BL.shape
        return Packing(lengths=(length,) * b, segment_BL=segment_BL)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def max_len(self) -> int:
        return max(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)

    @property  # not a cached one: its lock, before Python 3.12, would cut a compiled graph
    def is_dense(self) -> bool:
        return len(set(self.lengths)) == 1

    @cached_property
    def is_one_each(self) -> bool:
        """Whether every sequence has exactly one token, as in a decode step."""
        return set(self.lengths) == {1}

    @cached_property
    def slot_T(self) -> Tensor:
        """Where each packed token lies in the flattened padded [B, L] block."""
        max_len = self.max_len
        # Kept for later calls, which may train: never an inference tensor.
        with torch.inference_mode(False):
            rows = [torch.arange(n) + row * max_len for row, n in enumerate(self.lengths)]
            return torch.cat(rows)

    @cached_property
    def last_T(self) -> list[int]:
        """Index of each sequence's last token among the T packed ones.

        Raises:
            ValueError: a sequence has none.
        """
        if min(self.lengths) == 0:
            raise ValueError(f"a sequence without a token has no last one, lengths {self.lengths}")
        return [end - 1 for end in self.cu_seqlens[1:]]

    def to_rows(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...]; short rows are zero-padded at the end."""
        shape = (self.num_sequences, self.max_len, *x_T.shape[1:])
        if self.is_dense:
            return x_T.view(shape)
        flat = x_T.new_zeros((shape[0] * shape[1], *shape[2:]))
        return flat.index_copy(0, self.slot_T.to(x_T.device), x_T).view(shape)

    def from_rows(self, x_BL: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]; the padding is dropped."""
        flat = x_BL.reshape(-1, *x_BL.shape[2:])
        return flat if self.is_dense else flat[self.slot_T.to(x_BL.device)]


def check_cuts(cuts: Cuts | None, packing: Packing) -> None:
    """Raises:
    ValueError: cuts are not of this packing's sequences, do not rise, or lie outside of them.
    """
    if cuts is None:
        return
    if packing.segment_BL is not None:
        raise ValueError("rows of several documents have no states to cut at")
    if len(cuts) != packing.num_sequences:
        raise ValueError(f"{len(cuts)} sequences of cuts for {packing.num_sequences} sequences")
    for at, length in zip(cuts, packing.lengths, strict=True):
        rising = all(a < b for a, b in zip((0, *at), at, strict=False))
        if not rising or (at and at[-1] > length):
            raise ValueError(f"cuts {at} do not rise from 1 to the sequence's {length} tokens")
