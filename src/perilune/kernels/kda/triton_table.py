"""How sequences are cut into chunks, as the kernels read it.

Legend: M chunks of all sequences, P pieces, N sequences, E cuts, T packed tokens.

A piece is a stretch of a sequence that ends where the state is wanted: at a cut, at the end of a
segment where a long sequence is spread over the card, or at the sequence's own end. Every chunk of
a piece but the last is full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Cuts, Packing
from perilune.kernels.common.small_table import small_table

CHUNK = 32


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
    cut_E: Tensor
    """The piece that ends at each cut."""
    single_P1: Tensor
    """As `piece_N1` if every piece were a sequence of its own."""
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

    @property
    def of_single_pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.start_P1, self.chunk_P1, self.single_P1


def chunk_table(
    packing: Packing,
    device: torch.device,
    cuts: Cuts | None = None,
    segment: int | None = None,
) -> ChunkTable:
    """`segment` is the longest piece, in tokens."""
    columns = _cut(packing.lengths, cuts or ((),) * packing.num_sequences, segment, device)
    documents = packing.segment_BL
    return ChunkTable(*columns, None if documents is None else documents.reshape(-1))


@lru_cache(maxsize=32)
def _cut(
    lengths: tuple[int, ...], cuts: Cuts, segment: int | None, device: torch.device
) -> tuple[Tensor, ...]:
    chunks: list[tuple[int, int, int]] = []
    piece_starts, piece_chunks, pieces, cut_pieces, total = [0], [0], [0], [], 0
    for length, wanted in zip(lengths, cuts, strict=True):
        begin = 0
        for end in sorted({*wanted, *range(segment or length, length, segment or 1), length} - {0}):
            chunks += [
                (total + token, min(CHUNK, end - token), int(token > 0))
                for token in range(begin, end, CHUNK)
            ]
            if end in wanted:
                cut_pieces.append(len(piece_starts) - 1)
            piece_starts.append(total + end)
            piece_chunks.append(len(chunks))
            begin = end
        pieces.append(len(piece_starts) - 1)
        total += length
    starts, sizes, carries = zip(*chunks, strict=True) if chunks else ((), (), ())
    single = range(len(piece_starts))
    columns = (starts, sizes, carries, piece_starts, piece_chunks, pieces, cut_pieces, single)
    return tuple(small_table(column, torch.int64, device) for column in columns)
