"""The convolution forward: a program walks a run of tokens with the last W-1 inputs in registers.

Legend: T packed tokens, C channels, N sequences, W taps, M runs.
"""

from __future__ import annotations

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
    input_at,
    place,
    unbroken,
    weights,
    where,
)
from perilune.kernels.common.triton_math import uses_ptx

LONGEST_RUN = 64


def forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_NWC: Tensor | None,
    segment_T: Tensor | None,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """(y [T, C], fp32 windows [N, W-1, C]; the latter without a row for segmented rows)."""
    (t, c), w = x_TC.shape, weight_CW.shape[1]
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    num_windows = len(lengths) if segment_T is None else 0
    after = x_TC.new_empty(num_windows, w - 1, c, dtype=torch.float32)
    blocks = triton.cdiv(c, BLOCK)
    length = run_length(t, blocks, LONGEST_RUN)
    run_M4 = runs(lengths, length, x_TC.device)
    _forward[(run_M4.shape[0] * blocks,)](
        x_TC,
        weight_CW,
        window_NWC,
        segment_T,
        run_M4,
        y_TC,
        after,
        x_TC.stride(0),
        c,
        length,
        W=w,
        SEGMENTED=segment_T is not None,
        PTX=uses_ptx(x_TC.device),
        BC=BLOCK,
        U=UNROLL,
        num_warps=WARPS,
    )
    return y_TC, after


@triton.jit
def _forward(
    x_p,
    weight_p,
    window_p,
    segment_p,
    run_p,
    y_p,
    after_p,
    stride,
    C,
    length,
    W: tl.constexpr,
    SEGMENTED: tl.constexpr,
    PTX: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
):
    _, start, first, end, n, c_ = place(run_p, C, BC)
    stop = tl.minimum(start + length, end)
    taps = weights(weight_p, c_, C, W, BC)
    past, _ = before(x_p, window_p, segment_p, stride, start, first, end, n, c_, C, W, SEGMENTED)
    run = (first, stop)
    memory = (x_p + c_, stride, y_p + c_, segment_p)
    inner = start
    if SEGMENTED:
        # The first token of a run may be the first of its row: nothing lies before it.
        past = _tokens(start, past, taps, run, memory, c_, C, W, True, PTX, U, True)
        inner += U
    edge = inner + tl.maximum(stop - inner, 0) // U * U
    for t in range(inner, edge, U):
        if SEGMENTED:
            if unbroken(segment_p, t, U):
                past = _tokens(t, past, taps, run, memory, c_, C, W, False, PTX, U, False)
            else:
                for one in range(t, t + U):
                    past = _tokens(one, past, taps, run, memory, c_, C, W, True, PTX, 1, False)
        else:
            past = _tokens(t, past, taps, run, memory, c_, C, W, False, PTX, U, False)
    if edge < stop:
        past = _tokens(edge, past, taps, run, memory, c_, C, W, SEGMENTED, PTX, U, True)
    if not SEGMENTED and stop == end:
        for i in tl.static_range(W - 1):
            x_C = input_at(x_p, window_p, stride, end - (W - 1) + i, first, end, n, c_, C, W)
            tl.store(after_p + (n * (W - 1) + i) * C + c_, x_C, mask=c_ < C)


@triton.jit
def _tokens(
    t,
    past,
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
    """Writes U outputs from token t on; the last W-1 inputs. With EDGE the run may end before."""
    first, stop = run
    x_p, stride, y_p, segment_p = memory
    rows = ()
    for u in tl.static_range(U):
        here_C = c_ < C
        if EDGE:
            here_C = where(c_, C, t + u < stop)
        rows += (tl.load(x_p + (t + u) * stride, mask=here_C, other=0.0),)
    for u in tl.static_range(U):
        if SEGMENTED:
            past = forget(past, begins(segment_p, t + u, first, stop), W)
        inputs = past
        inputs += (rows[u].to(tl.float32),)
        y_C, s_C = convolved(inputs, taps, W, PTX)
        here_C = c_ < C
        if EDGE:
            here_C = where(c_, C, t + u < stop)
        tl.store(y_p + (t + u) * C, (y_C * s_C).to(y_p.dtype.element_ty), mask=here_C)
        past = inputs[1:]
    return past
