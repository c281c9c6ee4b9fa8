"""How sequences are cut into runs of tokens: a program walks one run of a block of channels.

Legend: M runs of all sequences.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from perilune.kernels.common.small_table import small_table

SHORTEST_RUN = 16
ENOUGH_PROGRAMS = 1024
"""Walks of a warp each that keep a large card busy."""


def run_length(num_tokens: int, num_blocks: int, longest: int) -> int:
    """Tokens of a run: as many as leave enough programs."""
    length = longest
    while length > SHORTEST_RUN and num_tokens * num_blocks < ENOUGH_PROGRAMS * length:
        length //= 2
    return length


def runs(lengths: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    """[M, 4] int64: first token of the run, first and end of its sequence, number of the sequence.

    A sequence without a token has one run, which hands its window on.
    """
    return _cut(lengths, length, device)


@lru_cache(maxsize=64)
def _cut(lengths: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    rows, first = [], 0
    for n, size in enumerate(lengths):
        starts = range(first, first + max(size, 1), length)
        rows += [(start, first, first + size, n) for start in starts]
        first += size
    return small_table(rows, torch.int64, device)
