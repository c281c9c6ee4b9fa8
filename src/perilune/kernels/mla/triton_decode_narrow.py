"""A part of absorbed decoding with query rows along N, where a few of them need no padding.

Legend: S query rows of a tile (`row = query token * heads + head`), N tokens of a tile, C latent
width, R shared key channels.

Tokens, then channels, are what a warp group's product wants 64 of: `s^T = c q^T`, `o^T += c^T p^T`.
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
    row_in_pool,
    row_pointers,
    whole_tiles,
)


@triton.jit
def narrow_part(
    q_p,
    c_p,
    r_p,
    c_d,
    r_d,
    rate_p,
    table_p,
    partial_p,
    lse_p,
    first,
    last,
    length,
    end,
    step,
    first_row,
    q_q_stride,
    q_h_stride,
    c_page_stride,
    r_page_stride,
    rate_page_stride,
    rate_stride,
    scale,
    FIRST_ROW: tl.constexpr,
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
    TMA: tl.constexpr,
):
    """As `wide_part`."""
    DTYPE: tl.constexpr = q_p.dtype.element_ty
    RATED: tl.constexpr = c_p.dtype.element_ty != DTYPE
    row_S = first_row + tl.arange(0, BS)
    c_, r_ = tl.arange(0, BC), tl.arange(0, BR)
    here_S1 = (row_S < ROWS)[:, None]
    q_S1 = query_pointers(q_p, FIRST_ROW + row_S, q_q_stride, q_h_stride, Q, H)[:, None]
    q_SC = tl.load(q_S1 + c_[None, :], mask=here_S1 & (c_ < C)[None, :], other=0.0)
    q_SR = tl.load(q_S1 + C + r_[None, :], mask=here_S1 & (r_ < R)[None, :], other=0.0)
    q_CS, q_RS = tl.trans(q_SC), tl.trans(q_SR)
    limit_S = limits(FIRST_ROW + row_S, length, end, Q, H)
    highest_S = tl.full([BS], LOWEST, tl.float32)
    # Summed over tokens at the end: their axis is shared out among warps.
    total_NS = tl.zeros([BN, BS], tl.float32)
    o_CS = tl.zeros([BC, BS], tl.float32)
    here = first
    if TMA:
        full, here = whole_tiles(first, last, end, step, BN)
        ahead = page_ahead(table_p, first, last, PAGE, BN)
        for tile in tl.range(first, full, step, num_stages=2):
            row = row_in_pool(ahead, c_page_stride // C_STRIDE, tile, PAGE, BN)
            c_NC, r_NR = c_d.load([row, 0]), r_d.load([row, 0])
            token_N = tile * BN + tl.arange(0, BN)
            here_N = token_N < tl.where(ahead >= 0, end, 0)
            if PAGE > 0:
                ahead = page_ahead(table_p, tile + step, last, PAGE, BN)
            # Always so. A region of its own sends the next tile's loads ahead of it.
            if tile >= 0:
                s_NS = tl.dot(c_NC, q_CS, input_precision=PRECISION) * scale
                s_NS += tl.dot(r_NR, q_RS, input_precision=PRECISION) * scale
                if Q == 1:
                    seen_NS = here_N[:, None]
                else:
                    seen_NS = here_N[:, None] & (token_N[:, None] < limit_S[None, :])
                s_NS = tl.where(seen_NS, s_NS, float("-inf"))
                top_S = tl.maximum(highest_S, tl.max(s_NS, axis=0))
                s_NS = exp2(s_NS - top_S[None, :], PTX)
                faded_S = exp2(highest_S - top_S, PTX)
                total_NS = total_NS * faded_S[None, :] + s_NS
                o_CS *= faded_S[None, :]
                o_CS = tl.dot(tl.trans(c_NC), s_NS.to(DTYPE), o_CS, input_precision=PRECISION)
                highest_S = top_S
    ahead = page_ahead(table_p, here, last, PAGE, BN)
    for tile in tl.range(here, last, step, num_stages=1 if TMA else 2):
        page, place_N = place_in_pages(table_p, ahead, tile, end, PAGE, BN)
        if PAGE > 0:
            ahead = page_ahead(table_p, tile + step, last, PAGE, BN)
        token_N = tile * BN + tl.arange(0, BN)
        here_N = token_N < tl.where(page >= 0, end, 0)
        c_N = row_pointers(c_p, page, place_N, c_page_stride, C_STRIDE, PAGE, BN)
        r_N = row_pointers(r_p, page, place_N, r_page_stride, R_STRIDE, PAGE, BN)
        c_NC = tl.load(c_N[:, None] + c_[None, :], mask=inside(here_N, c_, C, BC), other=0.0)
        r_NR = tl.load(r_N[:, None] + r_[None, :], mask=inside(here_N, r_, R, BR), other=0.0)
        c_NC = c_NC.to(DTYPE)
        if RATED:
            rate_N = row_pointers(rate_p, page, place_N, rate_page_stride, rate_stride, PAGE, BN)
            rate_N = tl.load(rate_N, mask=here_N, other=0.0)
        # As above.
        if tile >= 0:
            s_NS = tl.dot(c_NC, q_CS, input_precision=PRECISION) * scale
            if RATED:
                s_NS *= rate_N[:, None]
            s_NS += tl.dot(r_NR, q_RS, input_precision=PRECISION) * scale
            if Q == 1:
                seen_NS = here_N[:, None]
            else:
                seen_NS = here_N[:, None] & (token_N[:, None] < limit_S[None, :])
            s_NS = tl.where(seen_NS, s_NS, float("-inf"))
            top_S = tl.maximum(highest_S, tl.max(s_NS, axis=0))
            s_NS = exp2(s_NS - top_S[None, :], PTX)
            faded_S = exp2(highest_S - top_S, PTX)
            total_NS = total_NS * faded_S[None, :] + s_NS
            if RATED:
                s_NS *= rate_N[:, None]
            o_CS *= faded_S[None, :]
            o_CS = tl.dot(tl.trans(c_NC), s_NS.to(DTYPE), o_CS, input_precision=PRECISION)
            highest_S = top_S
    total_S = tl.sum(total_NS, axis=0)
    o_CS *= tl.where(total_S > 0, 1.0 / total_S, 0.0)[None, :]
    at_CS = row_S[None, :] * C + c_[:, None]
    tl.store(partial_p + at_CS, o_CS, mask=(row_S < ROWS)[None, :] & (c_ < C)[:, None])
    tl.store(lse_p + row_S, highest_S + tl.log2(total_S), mask=row_S < ROWS)
