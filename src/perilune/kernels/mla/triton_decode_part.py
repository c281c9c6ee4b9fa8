"""A part of absorbed decoding in plain Triton: tokens of one sequence for a tile of query rows.

Legend: S query rows of a tile (`row = query token * heads + head`), N tokens of a tile, C latent
width, R shared key channels.

The tile of latents is operand of both products, `s = q c^T` and `o += p c`, so its shared memory
is filled once, and a tile ahead of use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.common.triton_math import exp2
from perilune.kernels.mla.triton_decode_tile import (
    LOWEST,
    inside,
    limits,
    page_ahead,
    place_in_pages,
    query_pointers,
    row_pointers,
    seen_by,
)


@triton.jit
def part(
    q_p,
    c_p,
    r_p,
    rate_p,
    table_p,
    partial_p,
    lse_p,
    first,
    last,
    length,
    end,
    first_row,
    q_q_stride,
    q_h_stride,
    c_page_stride,
    r_page_stride,
    rate_page_stride,
    rate_stride,
    scale,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    C_STRIDE: tl.constexpr,
    R_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
):
    """Tiles first to last - 1 of one sequence, for the BS rows from first_row."""
    DTYPE: tl.constexpr = q_p.dtype.element_ty
    RATED: tl.constexpr = c_p.dtype.element_ty != DTYPE
    row_S = first_row + tl.arange(0, BS)
    c_, r_ = tl.arange(0, BC), tl.arange(0, BR)
    here_S1 = (row_S < ROWS)[:, None]
    q_S1 = query_pointers(q_p, row_S, q_q_stride, q_h_stride, Q, H)[:, None]
    if not IN_CHUNKS:
        q_SC = tl.load(q_S1 + c_[None, :], mask=here_S1 & (c_ < C)[None, :], other=0.0)
        q_SR = tl.load(q_S1 + C + r_[None, :], mask=here_S1 & (r_ < R)[None, :], other=0.0)
    limit_S = limits(row_S, length, end, Q, H)
    highest_S = tl.full([BS], LOWEST, tl.float32)
    total_S = tl.zeros([BS], tl.float32)
    o_SC = tl.zeros([BS, BC], tl.float32)
    ahead = page_ahead(table_p, first, last, PAGE, BN)
    for tile in tl.range(first, last, num_stages=2):
        page, place_N = place_in_pages(table_p, ahead, tile, end, PAGE, BN)
        if PAGE > 0:
            ahead = page_ahead(table_p, tile + 1, last, PAGE, BN)
        token_N = tile * BN + tl.arange(0, BN)
        here_N = token_N < tl.where(page >= 0, end, 0)
        c_N = row_pointers(c_p, page, place_N, c_page_stride, C_STRIDE, PAGE, BN)
        r_N = row_pointers(r_p, page, place_N, r_page_stride, R_STRIDE, PAGE, BN)
        c_NC = tl.load(c_N[:, None] + c_[None, :], mask=inside(here_N, c_, C, BC), other=0.0)
        c_NC = c_NC.to(DTYPE)
        if RATED:
            rate_N = row_pointers(rate_p, page, place_N, rate_page_stride, rate_stride, PAGE, BN)
            rate_N = tl.load(rate_N, mask=here_N, other=0.0)
        if not IN_CHUNKS:
            r_NR = tl.load(r_N[:, None] + r_[None, :], mask=inside(here_N, r_, R, BR), other=0.0)
            c_CN, r_RN = tl.trans(c_NC), tl.trans(r_NR)
        # Both conditions always hold. A region of its own sends the next tile's loads ahead of it,
        # and parts the scores' layout from the outputs': in one region every warp group would
        # compute all scores.
        if tile >= 0:
            if tile < last:
                # Scaled apart: joined to one chain, they would be laid out as the outputs are.
                if IN_CHUNKS:
                    s_SN = _scores(q_S1, c_N, here_S1, here_N, C, BN, PRECISION) * scale
                    r_SN = _scores(q_S1 + C, r_N, here_S1, here_N, R, BN, PRECISION) * scale
                else:
                    s_SN = tl.dot(q_SC, c_CN, input_precision=PRECISION) * scale
                    r_SN = tl.dot(q_SR, r_RN, input_precision=PRECISION) * scale
                if RATED:
                    s_SN *= rate_N[None, :]
                s_SN += r_SN
                seen_SN = seen_by(here_N, token_N, limit_S, Q)
                s_SN = tl.where(seen_SN, s_SN, float("-inf"))
                top_S = tl.maximum(highest_S, tl.max(s_SN, axis=1))
                s_SN = exp2(s_SN - top_S[:, None], PTX)
                sum_S = tl.sum(s_SN, axis=1)
                if RATED:
                    s_SN *= rate_N[None, :]
                p_SN = s_SN.to(DTYPE)
            else:
                top_S, sum_S = highest_S, total_S
                p_SN = tl.full([BS, BN], scale, tl.float32).to(DTYPE)
            faded_S = exp2(highest_S - top_S, PTX)
            total_S = total_S * faded_S + sum_S
            o_SC = tl.dot(p_SN, c_NC, o_SC * faded_S[:, None], input_precision=PRECISION)
            highest_S = top_S
    o_SC *= tl.where(total_S > 0, 1.0 / total_S, 0.0)[:, None]
    at_SC = row_S[:, None] * C + c_[None, :]
    tl.store(partial_p + at_SC, o_SC, mask=here_S1 & (c_ < C)[None, :])
    tl.store(lse_p + row_S, highest_S + tl.log2(total_S), mask=row_S < ROWS)


@triton.jit
def _scores(
    q_S1, x_N, here_S1, here_N, WIDTH: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr
):
    """A few channels at a time: in fp32, queries of all channels would not fit the registers."""
    BK: tl.constexpr = 32
    s_SN = tl.zeros([here_S1.shape[0], BN], tl.float32)
    for first in range(0, WIDTH, BK):
        k_ = first + tl.arange(0, BK)
        q_SK = tl.load(q_S1 + k_[None, :], mask=here_S1 & (k_ < WIDTH)[None, :], other=0.0)
        here_KN = (k_ < WIDTH)[:, None] & here_N[None, :]
        x_KN = tl.load(x_N[None, :] + k_[:, None], mask=here_KN, other=0.0).to(q_SK.dtype)
        s_SN = tl.dot(q_SK, x_KN, s_SN, input_precision=PRECISION)
    return s_SN
