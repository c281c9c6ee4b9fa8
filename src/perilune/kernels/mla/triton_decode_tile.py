"""Tiles of cached rows: where they lie, and which of their tokens a query sees.

Legend: N tokens of a tile, C channels.

A tile in one page needs that page's number alone, read one tile ahead; where pages are no multiple
of tiles, every row asks for its own. `PAGE` is the rows of a page, or 0 where a sequence has one.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
"""Below every score, and finite: where nothing is seen, no infinities are subtracted."""


@triton.jit
def page_ahead(table_p, tile, last, PAGE: tl.constexpr, BN: tl.constexpr):
    """The page of a whole tile; behind the last one, that one's."""
    if PAGE == 0:
        return tl.load(table_p).to(tl.int64)
    elif PAGE % BN == 0:
        return tl.load(table_p + tl.minimum(tile, last - 1) // (PAGE // BN)).to(tl.int64)
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def place_in_pages(table_p, page, tile, end, PAGE: tl.constexpr, BN: tl.constexpr):
    """(page, row of it) of each token: one page for all of a tile in one."""
    n_ = tl.arange(0, BN)
    if PAGE == 0:
        return page, (tile * BN + n_).to(tl.int64)
    elif PAGE % BN == 0:
        return page, (tile % (PAGE // BN)) * BN + n_
    else:
        token_N = tile * BN + n_
        page_N = tl.load(table_p + token_N // PAGE, mask=token_N < end, other=-1)
        return page_N.to(tl.int64), token_N % PAGE


@triton.jit
def row_pointers(x_p, page, row_N, page_stride, stride, PAGE: tl.constexpr, BN: tl.constexpr):
    if PAGE % BN == 0:
        return (x_p + page * page_stride) + row_N * stride
    else:
        return x_p + (page * page_stride + row_N * stride)


@triton.jit
def inside(here_N, c_, C: tl.constexpr, BC: tl.constexpr):
    if C == BC:
        return here_N[:, None]
    else:
        return here_N[:, None] & (c_ < C)[None, :]


@triton.jit
def limits(row_S, length, end, Q: tl.constexpr, H: tl.constexpr):
    """How many tokens each query row sees: the last of Q query tokens sees all."""
    if Q == 1:
        return end
    else:
        return tl.minimum(length - (Q - 1) + row_S // H, end)


@triton.jit
def seen_by(here_N, token_N, limit_S, Q: tl.constexpr):
    """Which tokens each query row sees, [S, N]."""
    if Q == 1:
        return here_N[None, :]
    else:
        return here_N[None, :] & (token_N[None, :] < limit_S[:, None])


@triton.jit
def query_pointers(q_p, row_S, q_q_stride, q_h_stride, Q: tl.constexpr, H: tl.constexpr):
    if Q == 1:
        return q_p + row_S * q_h_stride
    else:
        return q_p + (row_S // H) * q_q_stride + (row_S % H) * q_h_stride
