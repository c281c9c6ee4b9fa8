"""The read backward: of a token, the sources are read twice, the second time out of a cache.

Legend: N sources, T packed tokens, D model width, M tokens of a tile, P programs, S 2 N + 1
statistics.

With p the shares, s the scores and r the inverse root mean squares of the sources v, and
ds = p (dh . v - mean), mean = sum of p dh . v: dv = p dh + ds r (q - s r v / D), and dq collects
ds r v. That mean is dh . h too; the rounding of h, however, would be most of ds where one source
has nearly all of the share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.attn_res.triton_forward import blocks, stages
from perilune.kernels.common.triton_math import LOG2_E, exp2, uses_ptx

TILE = 1024
TILES_AT_MOST = 32
ENOUGH_PROGRAMS = 256
REGISTERS = 128
"""So that two programs of 8 warps fit beside each other; a dozen values are spilled."""


class ReadGradients(NamedTuple):
    sources_NTD: Tensor
    query_D: Tensor
    """fp32."""


def backward(
    sources_NTD: Tensor, query_D: Tensor, stats_ST: Tensor, dh_TD: Tensor
) -> ReadGradients:
    """Of the operands of `forward` and its statistics, with `dh_TD` the gradient of the mixture."""
    n, t, d = sources_NTD.shape
    block = blocks(TILE, d)
    num_tiles = triton.cdiv(t, block.height)
    tiles = max(1, min(TILES_AT_MOST, num_tiles // ENOUGH_PROGRAMS))
    programs = triton.cdiv(num_tiles, tiles)
    dsources_NTD = sources_NTD.new_empty(n, t, d)
    dquery_PD = sources_NTD.new_empty(programs, d, dtype=torch.float32)
    if programs:
        _backward[(programs,)](
            sources_NTD,
            query_D,
            stats_ST,
            dh_TD,
            dsources_NTD,
            dquery_PD,
            n,
            t,
            tiles,
            sources_NTD.stride(0),
            sources_NTD.stride(1),
            dh_TD.stride(0),
            D=d,
            BM=block.height,
            BD=block.width,
            PTX=uses_ptx(dh_TD.device),
            STAGES=stages(t, block, dh_TD.element_size()),
            num_warps=block.num_warps,
            **({"maxnreg": REGISTERS} if uses_ptx(dh_TD.device) else {}),
        )
    return ReadGradients(dsources_NTD, dquery_PD.sum(0))


@triton.jit
def _backward(
    sources_p,
    query_p,
    stats_p,
    dh_p,
    dsources_p,
    dquery_p,
    num_sources,
    num_tokens,
    tiles,
    source_stride,
    token_stride,
    dh_stride,
    D: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.zeros([], tl.int64)
    d_ = tl.arange(0, BD)[None, :]
    q_1D = tl.load(query_p + d_, mask=d_ < D, other=0.0).to(tl.float32)
    dq_MD = tl.zeros([BM, BD], tl.float32)
    for i in range(tiles):
        m_ = (tl.program_id(0) * tiles + i) * BM + tl.arange(0, BM)
        is_token_M = m_ < num_tokens
        here_MD = is_token_M[:, None] & (d_ < D)
        row_M1 = m_.to(tl.int64)[:, None]
        dh_MD = tl.load(dh_p + row_M1 * dh_stride + d_, mask=here_MD, other=0.0).to(tl.float32)
        stat_at = stats_p + m_
        total_M = tl.load(stat_at, mask=is_token_M, other=0.0)
        mean_M = tl.zeros([BM], tl.float32)
        for n in tl.range(0, num_sources, num_stages=STAGES):
            at_MD = row_M1 * token_stride + (first + n) * source_stride + d_
            v_MD = tl.load(sources_p + at_MD, mask=here_MD, other=0.0).to(tl.float32)
            score_at = stat_at + (first + 1 + n) * num_tokens
            score_M = tl.load(score_at, mask=is_token_M, other=0.0)
            mean_M += exp2(score_M - total_M, PTX) * tl.sum(dh_MD * v_MD, axis=1)
        for back in tl.range(0, num_sources, num_stages=STAGES):
            # Backwards: what was read last is the surest to be cached.
            n = num_sources - 1 - back
            at_MD = row_M1 * token_stride + (first + n) * source_stride + d_
            v_MD = tl.load(sources_p + at_MD, mask=here_MD, other=0.0).to(tl.float32)
            score_at = stat_at + (first + 1 + n) * num_tokens
            score_M = tl.load(score_at, mask=is_token_M, other=0.0)
            r_at = stat_at + (first + 1 + num_sources + n) * num_tokens
            r_M = tl.load(r_at, mask=is_token_M, other=0.0)
            p_M = exp2(score_M - total_M, PTX)
            dsr_M = p_M * (tl.sum(dh_MD * v_MD, axis=1) - mean_M) * r_M
            fall_M = dsr_M * score_M * r_M * (1.0 / (LOG2_E * D))
            dv_MD = p_M[:, None] * dh_MD + dsr_M[:, None] * q_1D - fall_M[:, None] * v_MD
            dq_MD += dsr_M[:, None] * v_MD
            out_at = dsources_p + ((first + n) * num_tokens + row_M1) * D + d_
            tl.store(out_at, dv_MD.to(dsources_p.dtype.element_ty), mask=here_MD)
    dquery_at = dquery_p + tl.program_id(0).to(tl.int64) * D + tl.arange(0, BD)
    tl.store(dquery_at, tl.sum(dq_MD, axis=0), mask=tl.arange(0, BD) < D)
