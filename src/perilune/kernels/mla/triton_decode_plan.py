"""Which tiles of query rows there are, and how many programs sweep the context for each.

A *wide* tile has 64 rows along M of its products, a *narrow* one up to 32 along N. A team has some
programs for each tile, in proportion to what the tile costs, so that all of them read about the
same rows at the same time and memory sends each row once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

WIDE, MIN_NARROW, MAX_NARROW = 64, 16, 32
NARROW_COST = 0.67
"""Of a narrow tile, in wide ones: what operands in shared memory let it gain."""
MEMBERS = ((1, 1), (3, 2), (4, 3), (2, 1), (7, 5), (6, 5))
"""Programs of a team for each wide tile and for the narrow one."""
TOKENS = 64
FP32_ROWS, FP32_TOKENS = 16, 16
"""Two tiles of 64 would take twice the memory in fp32, and queries the registers."""


class Plan(NamedTuple):
    wide_block: int
    """Rows of a wide tile."""
    wide_rows: int
    narrow_block: int
    narrow_rows: int
    """Behind the wide rows; 0: no narrow tile."""
    wide_members: int
    narrow_members: int
    teams: int
    tokens: int
    """Of a tile."""
    in_chunks: bool
    """Scores from a few channels at a time."""

    @property
    def wide_tiles(self) -> int:
        return triton.cdiv(self.wide_rows, self.wide_block)

    @property
    def most_members(self) -> int:
        return max(self.wide_members, self.narrow_members)

    @property
    def wide_programs(self) -> int:
        return self.teams * self.wide_members * self.wide_tiles

    @property
    def narrow_programs(self) -> int:
        return self.teams * self.narrow_members if self.narrow_rows else 0


@cache
def plan_of(
    rows: int,
    dtype: torch.dtype,
    programs: int,
    narrow: bool = True,
    members: tuple[int, int] | None = None,
) -> Plan:
    """For so many query rows of a sequence and programs at a time. Without `narrow` all tiles are
    wide; `members` are chosen by cost where None."""
    block = FP32_ROWS if dtype == torch.float32 else WIDE
    rest = rows % block
    fits = narrow and dtype != torch.float32 and 0 < rest <= MAX_NARROW
    narrow_rows = rest if fits else 0
    wide_rows = rows - narrow_rows
    wide_tiles = triton.cdiv(wide_rows, block)
    if not (wide_tiles and narrow_rows):
        members = (1, 1)
    elif members is None:
        members = min(MEMBERS, key=lambda each: _time(each, wide_tiles, programs))
    wide_members, narrow_members = members
    team = wide_tiles * wide_members + (narrow_members if narrow_rows else 0)
    narrow_block = max(MIN_NARROW, triton.next_power_of_2(narrow_rows))
    return Plan(
        block,
        wide_rows,
        narrow_block,
        narrow_rows,
        wide_members,
        narrow_members,
        max(1, programs // team),
        FP32_TOKENS if dtype == torch.float32 else TOKENS,
        dtype == torch.float32,
    )


def _time(members: tuple[int, int], wide_tiles: int, programs: int) -> float:
    """Of the slower kind, for one row of tiles; infinite where not even one team fits."""
    wide, narrow = members
    teams = programs // (wide_tiles * wide + narrow)
    return max(1 / wide, NARROW_COST / narrow) / teams if teams else float("inf")


INTERPRETED_PROGRAMS = 6


@cache
def num_programs(device: torch.device) -> int:
    """How many programs run at a time: a tile's memory takes a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
