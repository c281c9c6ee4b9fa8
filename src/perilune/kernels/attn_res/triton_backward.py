"""The read backward: of a token, the sources are read twice, the second time out of a cache.

Legend: T packed tokens, D model width, N committed blocks, M = N + 1 sources, the running sum
last, P programs, S 2 M + 2 statistics.

Backwards through the norm first: with n = h r of the mixture h and dn = dy w,
dh = r (dn - n mean(dn n)), and dw collects dy n. Then, with p the shares, s the scores and r the
inverse root mean squares of the sources v, and ds = p (dh . v - dh . h): dv = p dh + ds r (q - s r
v / D), and dq collects ds r v. The mixture is made again, in fp32: rounded, it would be most of ds
where one source has nearly all of the share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.attn_res.triton_forward import at_once, blocks
from perilune.kernels.attn_res.triton_rows import pick, sums, wide
from perilune.kernels.common.triton_math import LOG2_E, exp2, uses_ptx

ELEMENTS = 32
"""Of a row, a thread."""
AHEAD_BYTES = 98304
"""Shared memory for sources that are loaded ahead."""


class ReadGradients(NamedTuple):
    query_D: Tensor
    """fp32."""
    weight_D: Tensor | None
    """fp32."""


def backward(
    sources: Sequence[Tensor],
    query_D: Tensor,
    weight_D: Tensor | None,
    stats_ST: Tensor,
    dh_TD: Tensor,
    dpartial_TD: Tensor | None,
    dsources: Sequence[Tensor],
) -> ReadGradients:
    """Of the operands of `forward` (the running sum with its update in it) and its statistics.

    `dh_TD` is the gradient of the result and `dpartial_TD` that of the running sum by others, which
    is added. Rows of stride 1; `dsources` are written.
    """
    t, d = dh_TD.shape
    padded, warps = blocks(d, ELEMENTS)
    tokens = max(1, triton.cdiv(t, at_once(warps)))
    programs = triton.cdiv(t, tokens)
    dquery_PD = dh_TD.new_empty(programs, d, dtype=torch.float32)
    dweight_PD = None if weight_D is None else torch.empty_like(dquery_PD)
    if programs:
        _backward[(programs,)](
            tuple(sources),
            tuple(x.stride(0) for x in sources),
            query_D,
            weight_D,
            stats_ST,
            dh_TD,
            dh_TD.stride(0),
            dpartial_TD,
            0 if dpartial_TD is None else dpartial_TD.stride(0),
            tuple(dsources),
            tuple(x.stride(0) for x in dsources),
            dquery_PD,
            dweight_PD,
            t,
            tokens,
            D=d,
            BD=padded,
            PTX=uses_ptx(dh_TD.device),
            STAGES=max(2, min(6, AHEAD_BYTES // (padded * dh_TD.element_size()))),
            num_warps=warps,
        )
    return ReadGradients(dquery_PD.sum(0), None if dweight_PD is None else dweight_PD.sum(0))


@triton.jit
def plus(dv_D, others_at, here_D, is_sum):
    """The running sum has a gradient from elsewhere, too."""
    if is_sum:
        dv_D += tl.load(others_at, mask=here_D, other=0.0).to(tl.float32)
    return dv_D


@triton.jit
def _backward(
    sources,
    strides,
    query_p,
    weight_p,
    stats_p,
    dh_p,
    dh_stride,
    dpartial_p,
    dpartial_stride,
    dsources,
    dstrides,
    dquery_p,
    dweight_p,
    num_tokens,
    tokens,
    D: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    M: tl.constexpr = len(sources)
    first = tl.zeros([], tl.int64)
    d_ = tl.arange(0, BD)
    here_D = d_ < D
    q_D = tl.load(query_p + d_, mask=here_D, other=0.0).to(tl.float32)
    dq_D = tl.zeros([BD], tl.float32)
    dw_D = tl.zeros([BD], tl.float32)
    start = tl.program_id(0) * tokens
    for i in range(start, tl.minimum(start + tokens, num_tokens)):
        token = first + i
        stat_at = stats_p + token
        total = tl.load(stat_at)
        h_D = tl.zeros([BD], tl.float32)
        for k in tl.range(0, M, num_stages=STAGES):
            n = tl.zeros([], tl.int32) + k
            v_D = tl.load(pick(sources, strides, n, token) + d_, mask=here_D, other=0.0)
            share = exp2(tl.load(stat_at + (1 + n) * num_tokens) - total, PTX)
            h_D += share * wide(v_D, PTX)
        dh_D = tl.load(dh_p + token * dh_stride + d_, mask=here_D, other=0.0).to(tl.float32)
        if weight_p is not None:
            r = tl.load(stat_at + (1 + 2 * M) * num_tokens)
            dw_D += dh_D * h_D * r
            dh_D *= tl.load(weight_p + d_, mask=here_D, other=0.0).to(tl.float32)
            along, square = sums(dh_D * h_D, h_D * h_D, PTX)
            fall = along * r * r / D
            dh_D = r * (dh_D - fall * h_D)
            mean = r * (along - fall * square)
        else:
            mean = tl.sum(dh_D * h_D, axis=0)
        for k in tl.range(0, M, num_stages=STAGES):
            # Backwards: what was read last is the surest to be cached.
            n = tl.zeros([], tl.int32) + (M - 1 - k)
            v_D = tl.load(pick(sources, strides, n, token) + d_, mask=here_D, other=0.0)
            v_D = wide(v_D, PTX)
            score = tl.load(stat_at + (1 + n) * num_tokens)
            r = tl.load(stat_at + (1 + M + n) * num_tokens)
            share = exp2(score - total, PTX)
            dsr = share * (tl.sum(dh_D * v_D, axis=0) - mean) * r
            dv_D = share * dh_D + dsr * q_D - dsr * score * r * (1.0 / (LOG2_E * D)) * v_D
            dq_D += dsr * v_D
            if dpartial_p is not None:
                others_at = dpartial_p + token * dpartial_stride + d_
                dv_D = plus(dv_D, others_at, here_D, n == M - 1)
            out_at = pick(dsources, dstrides, n, token) + d_
            tl.store(out_at, dv_D.to(dh_p.dtype.element_ty), mask=here_D)
    row = (first + tl.program_id(0)) * D
    tl.store(dquery_p + row + d_, dq_D, mask=here_D)
    if weight_p is not None:
        tl.store(dweight_p + row + d_, dw_D, mask=here_D)
