"""The read forward: a program mixes a few tokens, and every source is read once.

Legend: N sources, T packed tokens, D model width, M tokens of a tile, S 2 N + 1 statistics.

The softmax is taken as the sources come: what was summed before is rescaled when a higher score is
met. Floats become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, exp2, uses_ptx

TILE = 2048
ELEMENTS = 32
FEW_TOKENS = 256
"""So few that programs do not cover for each other: they load further ahead."""
AHEAD_BYTES = 98304
"""Shared memory for what is loaded ahead."""


class Mixture(NamedTuple):
    h_TD: Tensor
    stats_ST: Tensor
    """fp32: log2 of the sum of 2^score; the N scores, times log2 e; the N inverse root mean
    squares."""


class Blocks(NamedTuple):
    width: int
    """Next power of two of D."""
    height: int
    """Tokens of a tile."""
    num_warps: int


def blocks(tile: int, width: int) -> Blocks:
    """Tiles of about `tile` elements."""
    padded = triton.next_power_of_2(width)
    warps = min(16, max(4, padded // (32 * ELEMENTS)))
    return Blocks(padded, max(1, tile // padded), warps)


def forward(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Mixture:
    """The mixture, contiguous, and what backward asks for again."""
    n, t, d = sources_NTD.shape
    h_TD = sources_NTD.new_empty(t, d)
    stats_ST = sources_NTD.new_empty(2 * n + 1, t, dtype=torch.float32)
    block = blocks(TILE, d)
    if t:
        _forward[(triton.cdiv(t, block.height),)](
            sources_NTD,
            query_D,
            h_TD,
            stats_ST,
            n,
            t,
            sources_NTD.stride(0),
            sources_NTD.stride(1),
            eps,
            D=d,
            BM=block.height,
            BD=block.width,
            PTX=uses_ptx(h_TD.device),
            STAGES=stages(t, block, h_TD.element_size()),
            num_warps=block.num_warps,
        )
    return Mixture(h_TD, stats_ST)


def stages(num_tokens: int, block: Blocks, element_bytes: int) -> int:
    """Sources under way at a time, with the one that is worked on."""
    most = 8 if num_tokens <= FEW_TOKENS else 3
    return max(2, min(most, AHEAD_BYTES // (block.height * block.width * element_bytes)))


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sums(a_MD, b_MD, PTX: tl.constexpr):
    """Of the rows of both, with one exchange between the warps. An interpreter would add the pairs
    one by one."""
    if PTX:
        return tl.reduce((a_MD, b_MD), 1, _add_pairs)
    else:
        return tl.sum(a_MD, axis=1), tl.sum(b_MD, axis=1)


@triton.jit
def _forward(
    sources_p,
    query_p,
    h_p,
    stats_p,
    num_sources,
    num_tokens,
    source_stride,
    token_stride,
    eps,
    D: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    eps = tl.full([], eps, tl.float32)
    first = tl.zeros([], tl.int64)
    m_ = tl.program_id(0) * BM + tl.arange(0, BM)
    d_ = tl.arange(0, BD)[None, :]
    is_token_M = m_ < num_tokens
    here_MD = is_token_M[:, None] & (d_ < D)
    q_1D = tl.load(query_p + d_, mask=d_ < D, other=0.0).to(tl.float32)
    row_at = sources_p + m_.to(tl.int64)[:, None] * token_stride + d_
    stat_at = stats_p + m_
    top_M = tl.full([BM], float("-inf"), tl.float32)
    total_M = tl.zeros([BM], tl.float32)
    h_MD = tl.zeros([BM, BD], tl.float32)
    for n in tl.range(0, num_sources, num_stages=STAGES):
        v_MD = tl.load(row_at + (first + n) * source_stride, mask=here_MD, other=0.0)
        v_MD = v_MD.to(tl.float32)
        square_M, dot_M = sums(v_MD * v_MD, v_MD * q_1D, PTX)
        r_M = tl.rsqrt(square_M / D + eps)
        score_M = dot_M * r_M * LOG2_E
        tl.store(stat_at + (first + 1 + n) * num_tokens, score_M, mask=is_token_M)
        tl.store(stat_at + (first + 1 + num_sources + n) * num_tokens, r_M, mask=is_token_M)
        higher_M = tl.maximum(top_M, score_M)
        fade_M = exp2(top_M - higher_M, PTX)
        share_M = exp2(score_M - higher_M, PTX)
        top_M = higher_M
        total_M = total_M * fade_M + share_M
        h_MD = h_MD * fade_M[:, None] + share_M[:, None] * v_MD
    h_MD /= total_M[:, None]
    tl.store(stat_at, top_M + tl.log2(total_M), mask=is_token_M)
    out_at = h_p + m_.to(tl.int64)[:, None] * D + d_
    tl.store(out_at, h_MD.to(h_p.dtype.element_ty), mask=here_MD)
