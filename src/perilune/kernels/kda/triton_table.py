"""How sequences are cut into chunks, as the kernels read it.

Legend: M chunks of all sequences, N sequences, T packed tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing

CHUNK = 32


class ChunkTable(NamedTuple):
    start_M: Tensor
    """First token."""
    length_M: Tensor
    carries_M: Tensor
    """0 for the first chunk of a sequence."""
    first_N1: Tensor
    """First chunk of each sequence, and the number of chunks."""
    segment_T: Tensor | None
    """Document of every token, where rows hold several."""

    @property
    def num_chunks(self) -> int:
        return self.start_M.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.first_N1.shape[0] - 1

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        segment = self.start_M if self.segment_T is None else self.segment_T
        return self.start_M, self.length_M, self.carries_M, segment


def chunk_table(packing: Packing, device: torch.device) -> ChunkTable:
    segment = packing.segment_BL
    return ChunkTable(
        *_cut(packing.lengths, device), None if segment is None else segment.reshape(-1)
    )


@lru_cache(maxsize=32)
def _cut(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    starts, sizes, carries, first, total = [], [], [], [0], 0
    for length in lengths:
        for at in range(0, length, CHUNK):
            starts.append(total + at)
            sizes.append(min(CHUNK, length - at))
            carries.append(int(at > 0))
        first.append(len(starts))
        total += length
    with torch.inference_mode(False):
        return tuple(torch.tensor(x, device=device) for x in (starts, sizes, carries, first))
