"""How the context is shared out among programs, on the device: no length is known to the host.

Legend: N sequences, B sequences of a block.

All sequences' tiles of tokens stand in one row. Each team of programs takes as many neighbours of
it as any other, so that lengths need not be alike; within a team, members take tiles in turn. What
team i makes of sequence n is part `i + n`: along the row one of both grows, so no two parts share a
number, and the parts of a sequence are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(256)


@triton.jit
def tiles_of(rows, BN: tl.constexpr):
    return (tl.maximum(rows, 0) + BN - 1) // BN


@triton.jit
def num_tiles(length_p, sequences, capacity, BN: tl.constexpr):
    total = 0
    for first in range(0, sequences, BLOCK):
        total += tl.sum(_tiles(length_p, first, sequences, capacity, BN), axis=0)
    return total


@triton.jit
def place_of(tile, length_p, sequences, capacity, BN: tl.constexpr):
    """The sequence that a tile of the row belongs to, and the tiles before that sequence."""
    n, begin, before = 0, 0, 0
    for first in range(0, sequences, BLOCK):
        tiles_B = _tiles(length_p, first, sequences, capacity, BN)
        ends_B = before + tl.cumsum(tiles_B, axis=0)
        n_B = first + tl.arange(0, BLOCK)
        passed_B = (ends_B <= tile) & (n_B < sequences)
        n += tl.sum(passed_B.to(tl.int32), axis=0)
        begin += tl.sum(tl.where(passed_B, tiles_B, 0), axis=0)
        before += tl.sum(tiles_B, axis=0)
    return n, begin


@triton.jit
def write_begins(begin_p, length_p, sequences, capacity, BN: tl.constexpr):
    """For the merge: the tiles before each sequence, and before the end. One program is enough."""
    if tl.program_id(0) == 0:
        before = 0
        tl.store(begin_p, before)
        for first in range(0, sequences, BLOCK):
            tiles_B = _tiles(length_p, first, sequences, capacity, BN)
            n_B = first + tl.arange(0, BLOCK)
            ends_B = before + tl.cumsum(tiles_B, axis=0)
            tl.store(begin_p + 1 + n_B, ends_B, mask=n_B < sequences)
            before += tl.sum(tiles_B, axis=0)


@triton.jit
def _tiles(length_p, first, sequences, capacity, BN: tl.constexpr):
    n_B = first + tl.arange(0, BLOCK)
    rows_B = tl.load(length_p + n_B, mask=n_B < sequences, other=0)
    return tiles_of(tl.minimum(rows_B, capacity), BN)
