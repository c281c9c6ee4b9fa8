"""Which tiles of queries and keys there are, and what each has to see.

Legend: I tiles, T queries, S keys, M queries of a tile, N sequences, B rows, L tokens of a row.

A tile never spans two sequences: what is masked still meets its values, and a NaN of a neighbour
would come through. Those with most to do come first, so that the last ones to finish are short.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.common.small_table import small_table


class Tiles(NamedTuple):
    """Columns of int32; queries and keys are numbered throughout the pack."""

    query_I4: Tensor
    """First query, end of its sequence, first key of the sequence, key of query 0."""
    key_I5: Tensor
    """First key, end of its sequence, first query of the sequence, their end, key of query 0."""


class Documents(NamedTuple):
    """Of every token in rows that hold several documents."""

    first_T: Tensor
    end_T: Tensor
    """One past its last."""


@lru_cache(maxsize=64)
def tiles(
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    queries: int,
    keys: int,
    device: torch.device,
) -> Tiles:
    """Of that many queries, and keys, each: the last queries of a sequence see all its keys."""
    of_queries: list[tuple[int, ...]] = []
    of_keys: list[tuple[int, ...]] = []
    q_ends, k_ends = accumulate(lengths), accumulate(key_lengths)
    for t, s, q_end, k_end in zip(lengths, key_lengths, q_ends, k_ends, strict=True):
        q_first, k_first, shift = q_end - t, k_end - s, k_end - q_end
        of_queries += [(q, q_end, k_first, shift) for q in range(q_first, q_end, queries)]
        of_keys += [(k, k_end, q_first, q_end, shift) for k in range(k_first, k_end, keys)]
    of_queries.sort(key=lambda x: x[2] - x[0] - x[3])
    of_keys.sort(key=lambda x: max(x[2], x[0] - x[4]) - x[3])
    # Kept for later calls, which may train: never inference tensors.
    with torch.inference_mode(False):
        return Tiles(_table(of_queries, 4, device), _table(of_keys, 5, device))


def _table(rows: list[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    return small_table(rows, torch.int32, device).view(-1, width)


def documents(packing: Packing) -> Documents | None:
    """None where every row is one document. Nothing is asked of the device."""
    segment_BL = packing.segment_BL
    if segment_BL is None:
        return None
    (b, length), device = segment_BL.shape, segment_BL.device
    at_BL = torch.arange(b * length, device=device, dtype=torch.int32).view(b, length)
    same_BL = segment_BL[:, 1:] == segment_BL[:, :-1]
    first_BL, end_BL = at_BL.clone(), at_BL + 1
    first_BL[:, 1:].masked_fill_(same_BL, 0)
    end_BL[:, :-1].masked_fill_(same_BL, b * length)
    first_BL = first_BL.cummax(1).values
    end_BL = end_BL.flip(1).cummin(1).values.flip(1)
    return Documents(first_BL.reshape(-1), end_BL.reshape(-1))
