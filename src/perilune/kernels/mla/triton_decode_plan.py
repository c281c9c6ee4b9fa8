"""Which tiles of query rows there are, and how many programs share the context for each.

Legend: N sequences.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

BLOCK, TOKENS = 64, 64
"""Query rows and tokens of a tile: what a warp group's product takes. Fewer rows are padded."""
FP32_BLOCK, FP32_TOKENS = 16, 16
"""Two tiles of 64 would take twice the memory in fp32, and queries the registers."""


class Plan(NamedTuple):
    rows: int
    """Of a sequence: its query tokens times heads."""
    block: int
    """Of these, a tile's."""
    teams: int
    """Of programs, one for each tile of rows; each team takes an equal share of the context."""
    tokens: int
    """Of a tile."""
    in_chunks: bool
    """Scores from a few channels at a time."""

    @property
    def programs(self) -> int:
        return self.teams * triton.cdiv(self.rows, self.block)


class Parts(NamedTuple):
    """What programs leave for the merge, all of it for one row of tiles."""

    begin: Tensor
    """Tiles of tokens before each sequence, and before the end [N + 1]."""
    partial: Tensor
    """fp32 outputs, each over the sum of its own shares."""
    lse: Tensor
    """Logarithms to base 2 of those sums."""


@cache
def plan_of(rows: int, dtype: torch.dtype, programs: int) -> Plan:
    """For so many query rows of a sequence and programs at a time."""
    fp32 = dtype == torch.float32
    block, tokens = (FP32_BLOCK, FP32_TOKENS) if fp32 else (BLOCK, TOKENS)
    return Plan(rows, block, max(1, programs // triton.cdiv(rows, block)), tokens, fp32)


INTERPRETED_PROGRAMS = 6


@cache
def num_programs(device: torch.device) -> int:
    """How many programs run at a time: a tile's memory takes a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
