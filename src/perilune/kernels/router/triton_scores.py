"""Scores and their order in fp32, alike in every kernel of the room.

A kernel that scores an expert twice must get the same bits: it is launched without
`enable_fp_fusion`, and what is fused stands here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from perilune.kernels.common.triton_math import reciprocal

FARTHEST: tl.constexpr = tl.constexpr(87.0)
"""Beyond this a score is 1 or, as good as 0, 1.6e-38: neither it nor what it is made of leaves the
normal numbers of fp32."""
NONE: tl.constexpr = tl.constexpr(-2147483648)
"""Below every key: what is absent or taken."""


@triton.jit
def fine_sigmoid(x, PTX: tl.constexpr):
    """With CUDA's own exponential and a rounded quotient, as the reference on a GPU: scores that
    hardly differ have to come in its order."""
    x = tl.clamp(x, -FARTHEST, FARTHEST, propagate_nan=tl.PropagateNan.ALL)
    # A factor of -1 is an operand's sign, where a minus would be a subtraction from zero.
    if PTX:
        total = 1.0 + libdevice.exp(x * -1.0)
        score = reciprocal(total, PTX)
        return tl.fma(score, tl.fma(total * -1.0, score, 1.0), score)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(x * -1.0))


@triton.jit
def higher(x, y):
    """Of two numbers; NaN is above all of them."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def same_bits(x, y):
    """Equal, NaN with itself too: sums have one NaN only."""
    return x.to(tl.int32, bitcast=True) == y.to(tl.int32, bitcast=True)


@triton.jit
def sortable(x, PTX: tl.constexpr):
    """Integers in the order of fp32 numbers, NaN above all of them."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # A GPU's one NaN is the highest of integers.
    return order if PTX else tl.where(x != x, 0x7FFFFFFF, order)


@triton.jit
def sorted_back(order):
    """The number of which `order` is the integer."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
