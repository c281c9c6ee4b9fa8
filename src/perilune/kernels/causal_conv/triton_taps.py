"""What a walk over the tokens of some channels needs, forward and backward.

Legend: C channels of a block, W taps. A tuple of W-1 vectors [C] holds the inputs before the
current token, oldest first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.common.triton_math import sigmoid

WARPS = 1
BLOCK = 128 * WARPS
"""Channels of a program: four a thread leave registers for many programs."""
UNROLL = 8
"""Rows that are on their way at once."""


@triton.jit
def place(run_p, C, BC: tl.constexpr):
    """(number of the run, its first token, first and end of its sequence, number of the sequence,
    channels [BC]) of this program. Blocks of channels follow one another: whole rows are read."""
    blocks = tl.cdiv(C, BC)
    m = (tl.program_id(0) // blocks).to(tl.int64)
    c_ = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    run_p += m * 4
    return m, tl.load(run_p), tl.load(run_p + 1), tl.load(run_p + 2), tl.load(run_p + 3), c_


@triton.jit
def where(c_, C, here):
    """The channels there are, or none where not `here`: a mask that is known to be aligned."""
    return c_ < tl.where(here, C, 0)


@triton.jit
def weights(weight_p, c_, C, W: tl.constexpr, BC: tl.constexpr):
    """The W taps, [BC] each, by coalesced loads of [BC, W]."""
    WIDE: tl.constexpr = triton.next_power_of_2(W)
    j_ = tl.arange(0, WIDE)[None, :]
    here_CW = (c_[:, None] < C) & (j_ < W)
    w_CW = tl.load(weight_p + c_[:, None] * W + j_, mask=here_CW, other=0.0).to(tl.float32)
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.sum(tl.where(j_ == j, w_CW, 0.0), axis=1),)
    return taps


@triton.jit
def begins(segment_p, t, first, stop):
    """Whether a document begins at token t."""
    own = tl.load(segment_p + t, mask=(t >= first) & (t < stop), other=0)
    before = tl.load(segment_p + t - 1, mask=(t > first) & (t < stop), other=0)
    return (t <= first) | (own != before)


@triton.jit
def unbroken(segment_p, t, U: tl.constexpr):
    """Whether no document begins at the U tokens from t on, of which none is a row's first."""
    before = tl.load(segment_p + t - 1)
    same = before == before
    for u in tl.static_range(U):
        own = tl.load(segment_p + t + u)
        same = same & (own == before)
        before = own
    return same


@triton.jit
def forget(past, fresh, W: tl.constexpr):
    """No input at all where `fresh`."""
    kept = ()
    for i in tl.static_range(W - 1):
        kept += (tl.where(fresh, 0.0, past[i]),)
    return kept


@triton.jit
def before(
    x_p,
    window_p,
    segment_p,
    stride,
    start,
    first,
    end,
    n,
    c_,
    C,
    W: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """(the W-1 inputs before token `start`, how many of them belong to its document at least)."""
    past, reach = (), start * 0
    for i in tl.static_range(W - 1):
        x_C = input_at(x_p, window_p, stride, start - (W - 1) + i, first, end, n, c_, C, W)
        past += (x_C,)
    if SEGMENTED:
        for i in tl.static_range(W - 1):
            fresh = begins(segment_p, start - (W - 1) + i, first, end)
            reach = tl.where(fresh, 0, reach + 1)
            kept = ()
            for k in tl.static_range(W - 1):
                kept += (tl.where(fresh & (k < i), 0.0, past[k]),)
            past = kept
    return past, reach


@triton.jit
def input_at(x_p, window_p, stride, t, first, end, n, c_, C, W: tl.constexpr):
    """Input of token t in fp32; before the first one that of the window, or zero."""
    here_C = where(c_, C, (t >= first) & (t < end))
    x_C = tl.load(x_p + t * stride + c_, mask=here_C, other=0.0).to(tl.float32)
    if window_p is not None:
        at = window_p + (n * (W - 1) + t - first + W - 1) * C + c_
        x_C += tl.load(at, mask=where(c_, C, t < first), other=0.0).to(tl.float32)
    return x_C


@triton.jit
def convolved(inputs, taps, W: tl.constexpr, PTX: tl.constexpr):
    """(weighted sum of W inputs, its sigmoid), of the same bits wherever it is compiled in."""
    y_C = taps[W - 1] * inputs[W - 1]
    for back in tl.static_range(1, W):
        y_C = tl.fma(taps[W - 1 - back], inputs[W - 1 - back], y_C)
    return y_C, sigmoid(y_C, PTX)
