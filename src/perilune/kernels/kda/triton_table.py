"""How sequences are cut into chunks, as the kernels read it.

Legend: M chunks of all sequences, P pieces, N sequences, T packed tokens.

A piece is a stretch of a sequence that ends where the state is wanted: at a cut or at its end.
Every chunk of a piece but the last is full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing

CHUNK = 32

Cuts = tuple[tuple[int, ...], ...]
"""Of every sequence, rising numbers of tokens after which the state is wanted."""


class ChunkTable(NamedTuple):
    start_M: Tensor
    """First token."""
    length_M: Tensor
    carries_M: Tensor
    """0 for the first chunk of a sequence."""
    start_P1: Tensor
    """First token of each piece, and the number of tokens."""
    chunk_P1: Tensor
    """First chunk of each piece, and the number of chunks."""
    piece_N1: Tensor
    """First piece of each sequence, and the number of pieces."""
    segment_T: Tensor | None
    """Document of every token, where rows hold several."""

    @property
    def num_chunks(self) -> int:
        return self.start_M.shape[0]

    @property
    def num_pieces(self) -> int:
        return self.start_P1.shape[0] - 1

    @property
    def num_sequences(self) -> int:
        return self.piece_N1.shape[0] - 1

    @property
    def of_chunks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        segment = self.start_M if self.segment_T is None else self.segment_T
        return self.start_M, self.length_M, self.carries_M, segment

    @property
    def of_pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.start_P1, self.chunk_P1, self.piece_N1


def chunk_table(packing: Packing, device: torch.device, cuts: Cuts | None = None) -> ChunkTable:
    segment = packing.segment_BL
    cuts = cuts or ((),) * packing.num_sequences
    return ChunkTable(
        *_cut(packing.lengths, cuts, device), None if segment is None else segment.reshape(-1)
    )


@lru_cache(maxsize=32)
def _cut(lengths: tuple[int, ...], cuts: Cuts, device: torch.device) -> tuple[Tensor, ...]:
    starts: list[int] = []
    sizes: list[int] = []
    carries: list[int] = []
    piece_starts, piece_chunks, pieces, total = [0], [0], [0], 0
    for length, at in zip(lengths, cuts, strict=True):
        # A cut at the very end needs no piece of its own; an empty sequence has none.
        ends = [*(end for end in at if end < length), *([length] if length else [])]
        for begin, end in zip([0, *ends], ends, strict=False):
            for token in range(begin, end, CHUNK):
                starts.append(total + token)
                sizes.append(min(CHUNK, end - token))
                carries.append(int(token > 0))
            piece_starts.append(total + end)
            piece_chunks.append(len(starts))
        pieces.append(len(piece_starts) - 1)
        total += length
    columns = (starts, sizes, carries, piece_starts, piece_chunks, pieces)
    with torch.inference_mode(False):
        return tuple(torch.tensor(x, device=device) for x in columns)
