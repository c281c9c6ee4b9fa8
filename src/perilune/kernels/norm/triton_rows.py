"""How the rows of a norm lie in memory, and how many of them a program takes.

Legend: ... any leading shape, M rows, D normalised width. Rows come in groups (the heads of a
token), equally far apart inside of a group: row m begins at m // G * outer + m % G * inner.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

WIDEST = 16384
"""Elements of a row that one program still holds."""


class Rows(NamedTuple):
    x_D: Tensor
    outer: int
    inner: int


def rows_of(x_D: Tensor) -> Rows:
    """The rows as they lie, those of a projection's slice too; other layouts are copied."""
    if x_D.dim() == 1:
        x_D = x_D[None]
    if x_D.stride(-1) != 1 or not _one_outer_stride(x_D):
        x_D = x_D.contiguous()
    if x_D.dim() == 2:
        return Rows(x_D, x_D.stride(0), x_D.stride(0))
    # The stride of an axis of one may be anything.
    inner = x_D.stride(-2) if x_D.shape[-2] > 1 else x_D.stride(-3)
    return Rows(x_D, x_D.stride(-3), inner)


def _one_outer_stride(x_D: Tensor) -> bool:
    """Whether the axes before the last two are as one."""
    sizes, strides = x_D.shape[:-2], x_D.stride()[:-2]
    steps = zip(strides, strides[1:], sizes[1:], strict=False)
    return all(outer == inner * size for outer, inner, size in steps)


class Blocks(NamedTuple):
    num_rows: int
    group: int
    width: int
    """Next power of two of D."""
    height: int
    """Rows of a tile."""
    num_warps: int

    @property
    def num_tiles(self) -> int:
        return triton.cdiv(self.num_rows, self.height)


def blocks(tile: int, elements: int, *operands: Rows) -> Blocks:
    """Tiles of about `tile` elements of operands of one shape; a thread gets about `elements`."""
    x_D = operands[0].x_D
    d = x_D.shape[-1]
    grouped = x_D.dim() > 2 and any(rows.outer != x_D.shape[-2] * rows.inner for rows in operands)
    width = triton.next_power_of_2(d)
    return Blocks(
        num_rows=x_D.numel() // d,
        group=x_D.shape[-2] if grouped else 1,
        width=width,
        height=max(1, tile // width),
        num_warps=min(16, max(4, width // (32 * elements))),
    )


def strides(rows: Rows, group: int) -> tuple[int, int]:
    """(outer, inner) of groups of that size."""
    return (rows.inner, rows.inner) if group == 1 else (rows.outer, rows.inner)
