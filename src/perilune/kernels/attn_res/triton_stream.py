"""The read of many tokens: rows of sources pass through a program one after another.

Legend: T packed tokens, D model width, N committed blocks, M = N + 1 sources, R rows that a token
reads, S 2 M + 2 statistics.

A program reads the rows of one token after another as one stream, several of them ahead, so that
memory never waits for a token to end: of each the running sum, its update, then the blocks. The
softmax is taken as they come: what was mixed before is rescaled when a higher score is met.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.attn_res.triton_rows import pick, sums, wide
from perilune.kernels.common.triton_math import LOG2_E, exp2


@triton.jit
def summed(kept_D, v_D, partial_at, here_D, is_second):
    """With its other half, which was kept; the sum is written."""
    if is_second:
        sum_D = (kept_D + v_D).to(partial_at.dtype.element_ty)
        tl.store(partial_at, sum_D, mask=here_D)
        v_D = sum_D.to(tl.float32)
    return v_D


@triton.jit
def stream(
    rows,
    strides,
    query_p,
    weight_p,
    h_p,
    partial_p,
    stats_p,
    num_tokens,
    eps,
    norm_eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    UPDATED: tl.constexpr = partial_p is not None
    R: tl.constexpr = len(rows)
    M: tl.constexpr = R - 1 if UPDATED else R
    eps = tl.full([], eps, tl.float32)
    norm_eps = tl.full([], norm_eps, tl.float32)
    first = tl.zeros([], tl.int64)
    d_ = tl.arange(0, BD)
    here_D = d_ < D
    q_D = tl.load(query_p + d_, mask=here_D, other=0.0).to(tl.float32)
    h_D = tl.zeros([BD], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mine = tl.cdiv(num_tokens - tl.program_id(0), tl.num_programs(0))
    for k in tl.range(0, mine * R, num_stages=STAGES):
        row = tl.zeros([], tl.int32) + k
        n = row % R
        token = first + tl.program_id(0) + row // R * tl.num_programs(0)
        v_D = tl.load(pick(rows, strides, n, token) + d_, mask=here_D, other=0.0)
        v_D = wide(v_D, PTX)
        if UPDATED:
            v_D = summed(h_D, v_D, partial_p + token * D + d_, here_D, n == 1)
        square, dot = sums(v_D * v_D, v_D * q_D, PTX)
        r = tl.rsqrt(square / D + eps)
        score = dot * r * LOG2_E
        higher = tl.maximum(top, score)
        fade = exp2(top - higher, PTX)
        share = exp2(score - higher, PTX)
        if UPDATED:
            # Half of a sum: kept as it is, without a score.
            is_half = n == 0
            share = tl.where(is_half, 1.0, share)
            higher = tl.where(is_half, float("-inf"), higher)
            fade = tl.where(is_half, 0.0, fade)
        top = higher
        total = total * fade + share
        h_D = h_D * fade + share * v_D
        if UPDATED:
            total = tl.where(n == 0, 0.0, total)
        if stats_p is not None:
            # The running sum is the last source.
            at = tl.where(n < R - M + 1, M - 1, n - (R - M + 1))
            is_source = n >= R - M
            tl.store(stats_p + (1 + at) * num_tokens + token, score, mask=is_source)
            tl.store(stats_p + (1 + M + at) * num_tokens + token, r, mask=is_source)
        if n == R - 1:
            out_D = h_D / total
            if stats_p is not None:
                tl.store(stats_p + token, top + tl.log2(total))
            if weight_p is not None:
                norm = tl.rsqrt(tl.sum(out_D * out_D, axis=0) / D + norm_eps)
                w_D = tl.load(weight_p + d_, mask=here_D, other=0.0).to(tl.float32)
                out_D *= norm * w_D
                if stats_p is not None:
                    tl.store(stats_p + (1 + 2 * M) * num_tokens + token, norm)
            tl.store(h_p + token * D + d_, out_D.to(h_p.dtype.element_ty), mask=here_D)
            h_D = tl.zeros([BD], tl.float32)
            top = tl.full([], float("-inf"), tl.float32)
            total = tl.zeros([], tl.float32)
