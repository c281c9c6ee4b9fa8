"""The choice forward: a warp scores the experts of a token and takes the best of them one by one.

Legend: T tokens, E experts, R experts a token.

Floats become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import exp2, uses_ptx
from perilune.kernels.router.reference import Routes

LOG2_E: tl.constexpr = tl.constexpr(1.4426950216293335)
"""log2 e, of which fp32 holds this, and the rest of it."""
LOG2_E_REST: tl.constexpr = tl.constexpr(1.925963033500163e-8)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


def forward(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    """Of logits of stride 1: contiguous."""
    t, e = logits_TE.shape
    expert_TR = logits_TE.new_empty(t, num_active, dtype=torch.int64)
    weight_TR = logits_TE.new_empty(t, num_active, dtype=torch.float32)
    score_TE = logits_TE.new_empty(t, e, dtype=torch.float32)
    if t:
        _forward[(t,)](
            logits_TE,
            bias_E,
            expert_TR,
            weight_TR,
            score_TE,
            logits_TE.stride(0),
            scale,
            E=e,
            R=num_active,
            BE=triton.next_power_of_2(e),
            BR=triton.next_power_of_2(num_active),
            RENORMALIZE=renormalize,
            PTX=uses_ptx(logits_TE.device),
            num_warps=1,
        )
    return Routes(expert_TR, weight_TR, score_TE)


@triton.jit
def fine_sigmoid(x, PTX: tl.constexpr):
    """As exactly as fp32 allows: scores that hardly differ have to come in the reference's order.

    The exponent's rounding, which would grow with |x|, is made up for to first order.
    """
    high = -x * LOG2_E
    low = tl.fma(-x, LOG2_E, -high) - x * LOG2_E_REST
    power = exp2(high, PTX)
    is_finite = (power > 0.0) & (power < float("inf"))
    power = tl.where(is_finite, tl.fma(power, low * LN2, power), power)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + power)


@triton.jit
def sortable(x):
    """Integers in the order of fp32 numbers, NaN above all of them."""
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, order)


@triton.jit
def _forward(
    logits_p,
    bias_p,
    expert_p,
    weight_p,
    score_p,
    row_stride,
    scale,
    E: tl.constexpr,
    R: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PTX: tl.constexpr,
):
    scale = tl.full([], scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    e_ = tl.arange(0, BE)
    r_ = tl.arange(0, BR)
    logits_at = logits_p + row * row_stride
    logit_E = tl.load(logits_at + e_, mask=e_ < E, other=0.0).to(tl.float32)
    score_E = fine_sigmoid(logit_E, PTX)
    tl.store(score_p + row * E + e_, score_E, mask=e_ < E)
    biased_E = score_E + tl.load(bias_p + e_, mask=e_ < E, other=0.0).to(tl.float32)
    # The lowest integer is no number's: what is absent or taken.
    order_E = tl.where(e_ < E, sortable(biased_E), -2147483648)
    expert_R = tl.zeros([BR], tl.int32)
    for r in range(R):
        best = tl.max(order_E, axis=0)
        chosen = tl.min(tl.where(order_E == best, e_, BE), axis=0)
        order_E = tl.where(e_ == chosen, -2147483648, order_E)
        expert_R = tl.where(r_ == r, chosen, expert_R)
    # The same logits and the same arithmetic again: the same bits as among the scores.
    weight_R = tl.load(logits_at + expert_R, mask=r_ < R, other=0.0).to(tl.float32)
    weight_R = tl.where(r_ < R, fine_sigmoid(weight_R, PTX), 0.0)
    if RENORMALIZE:
        weight_R = weight_R / (tl.sum(weight_R, axis=0) + 1e-20)
    tl.store(weight_p + row * R + r_, weight_R * scale, mask=r_ < R)
    tl.store(expert_p + row * R + r_, expert_R.to(tl.int64), mask=r_ < R)
