"""The convolution backward: one walk recomputes the sums and gives every gradient.

Legend: T packed tokens, C channels, N sequences, W taps, M runs, g the gradient of a sum before
SiLU.

The gradient of token p collects g of tokens p .. p+W-1. A walk keeps the W-1 gradients that are not
complete yet and goes W-1 tokens beyond its run, so that no two programs write the same memory. Only
its first tokens and its last ones can touch a window: the others, in between, ask no questions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.causal_conv.triton_runs import run_length, runs
from perilune.kernels.causal_conv.triton_taps import (
    BLOCK,
    UNROLL,
    WARPS,
    before,
    begins,
    convolved,
    forget,
    place,
    unbroken,
    weights,
    where,
)
from perilune.kernels.common.triton_math import uses_ptx

LONGEST_RUN = 256
"""Longer than forward: each run leaves a sum of the weights' gradient."""


class ConvGradients(NamedTuple):
    x_TC: Tensor
    weight_CW: Tensor
    """fp32."""
    window_NWC: Tensor | None
    """fp32."""


def backward(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_NWC: Tensor | None,
    segment_T: Tensor | None,
    lengths: tuple[int, ...],
    dy_TC: Tensor,
    d_after_NWC: Tensor | None,
) -> ConvGradients:
    (t, c), w = x_TC.shape, weight_CW.shape[1]
    blocks = triton.cdiv(c, BLOCK)
    length = run_length(t, blocks, LONGEST_RUN)
    run_M4 = runs(lengths, length, x_TC.device)
    m, fp32 = run_M4.shape[0], torch.float32
    dx_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    dweight_MWC = x_TC.new_empty(m, w, c, dtype=fp32)
    dwindow = None if window_NWC is None else x_TC.new_empty(len(lengths), w - 1, c, dtype=fp32)
    _backward[(m * blocks,)](
        x_TC,
        weight_CW,
        window_NWC,
        segment_T,
        run_M4,
        dy_TC,
        d_after_NWC,
        dx_TC,
        dweight_MWC,
        dwindow,
        x_TC.stride(0),
        dy_TC.stride(0),
        c,
        length,
        W=w,
        SEGMENTED=segment_T is not None,
        PTX=uses_ptx(x_TC.device),
        BC=BLOCK,
        U=UNROLL,
        num_warps=WARPS,
    )
    return ConvGradients(dx_TC, dweight_MWC.sum(0).t(), dwindow)


@triton.jit
def _backward(
    x_p,
    weight_p,
    window_p,
    segment_p,
    run_p,
    dy_p,
    d_after_p,
    dx_p,
    dweight_p,
    dwindow_p,
    stride,
    dy_stride,
    C,
    length,
    W: tl.constexpr,
    SEGMENTED: tl.constexpr,
    PTX: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
):
    m, start, first, end, n, c_ = place(run_p, C, BC)
    stop = tl.minimum(start + length, end)
    taps = weights(weight_p, c_, C, W, BC)
    past, reach = before(
        x_p, window_p, segment_p, stride, start, first, end, n, c_, C, W, SEGMENTED
    )
    zero_C = tl.zeros([BC], tl.float32)
    open_, dtaps = (), (zero_C,)
    for _ in tl.static_range(W - 1):
        open_ += (zero_C,)
        dtaps += (zero_C,)
    walk = (past, reach, open_, dtaps)
    run = (start, stop, first, end)
    window_at = n * (W - 1) * C + c_
    memory = (
        (x_p + c_, stride),
        (dy_p + c_, dy_stride),
        segment_p,
        None if d_after_p is None else d_after_p + window_at,
        None if dwindow_p is None else dwindow_p + window_at,
        dx_p + c_,
    )

    inner = start + W - 1
    edge = inner + tl.maximum(stop - inner, 0) // U * U
    walk = _tokens(start, walk, taps, run, memory, c_, C, W, SEGMENTED, PTX, W - 1, True)
    for t in range(inner, edge, U):
        if SEGMENTED:
            if (walk[1] >= W - 1) & unbroken(segment_p, t, U):
                walk = _tokens(t, walk, taps, run, memory, c_, C, W, False, PTX, U, False)
            else:
                for one in range(t, t + U):
                    walk = _tokens(one, walk, taps, run, memory, c_, C, W, True, PTX, 1, False)
        else:
            walk = _tokens(t, walk, taps, run, memory, c_, C, W, False, PTX, U, False)
    for t in range(edge, stop + W - 1, U):
        walk = _tokens(t, walk, taps, run, memory, c_, C, W, SEGMENTED, PTX, U, True)

    dtaps = walk[3]
    for j in tl.static_range(W):
        tl.store(dweight_p + (m * W + j) * C + c_, dtaps[j], mask=c_ < C)


@triton.jit
def _tokens(
    t,
    walk,
    taps,
    run,
    memory,
    c_,
    C,
    W: tl.constexpr,
    SEGMENTED: tl.constexpr,
    PTX: tl.constexpr,
    U: tl.constexpr,
    EDGE: tl.constexpr,
):
    """The walk (inputs before, their reach, open gradients, gradients of the taps) U tokens on.

    Without EDGE all of these, and those whose gradients close, belong to the run and to no window.
    """
    _, stop, first, end = run
    x, dy, segment_p, _, _, _ = memory
    rows, drows = (), ()
    for u in tl.static_range(U):
        here_C = c_ < C
        if EDGE:
            here_C = where(c_, C, t + u < end)
        rows += (tl.load(x[0] + (t + u) * x[1], mask=here_C, other=0.0),)
        drows += (tl.load(dy[0] + (t + u) * dy[1], mask=here_C, other=0.0),)
    past, reach, open_, dtaps = walk
    for u in tl.static_range(U):
        if SEGMENTED:
            fresh = begins(segment_p, t + u, first, end)
            reach = tl.where(fresh, 0, reach + 1)
            past = forget(past, fresh, W)
        inputs = past
        inputs += (rows[u].to(tl.float32),)
        y_C, s_C = convolved(inputs, taps, W, PTX)
        # dy d(y s)/dy, with the slope of silu as s + s (y - y s).
        g_C = drows[u].to(tl.float32) * (s_C * (y_C - y_C * s_C) + s_C)
        own_C = g_C
        if EDGE:
            own_C = tl.where(t + u < stop, g_C, 0.0)
        grown, sums = (), ()
        for j in tl.static_range(W):
            reached_C = g_C
            if SEGMENTED and j < W - 1:
                reached_C = tl.where(reach >= W - 1 - j, g_C, 0.0)
            if j < W - 1:
                grown += (open_[j] + taps[j] * reached_C,)
            else:
                grown += (taps[j] * g_C,)
            sums += (dtaps[j] + own_C * inputs[j],)
        past, open_, dtaps = inputs[1:], grown[1:], sums
        _close(grown[0], t + u - (W - 1), run, memory, c_, C, W, EDGE)
    return past, reach, open_, dtaps


@triton.jit
def _close(dx_C, p, run, memory, c_, C, W: tl.constexpr, EDGE: tl.constexpr):
    """Writes the complete gradient of token p, where it is this run's."""
    start, stop, first, end = run
    _, _, _, d_after_p, dwindow_p, dx_p = memory
    here_C = c_ < C
    if EDGE:
        last = p - (end - (W - 1))
        if d_after_p is not None:
            kept_C = where(c_, C, (last >= 0) & (p < end))
            dx_C += tl.load(d_after_p + last * C, mask=kept_C, other=0.0).to(tl.float32)
        if dwindow_p is not None:
            tl.store(dwindow_p + (p - first + W - 1) * C, dx_C, mask=where(c_, C, p < first))
        here_C = where(c_, C, (p >= start) & (p < stop))
    tl.store(dx_p + p * C, dx_C.to(dx_p.dtype.element_ty), mask=here_C)
