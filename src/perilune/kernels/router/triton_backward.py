"""The choice backward: scores have a gradient, the choice has none.

Legend: T tokens, E experts, R experts a token.

With s the chosen scores, t = sum s + 1e-20 and weights w = s / t scale: ds = (dw - sum dw s / t)
scale / t, and not renormalised ds = dw scale. A logit's gradient is ds score (1 - score).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


def backward(
    expert_TR: Tensor,
    score_TE: Tensor,
    dweight_TR: Tensor | None,
    dscore_TE: Tensor | None,
    renormalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits, from that of the weights, that of the scores, or both."""
    (t, e), r = score_TE.shape, expert_TR.shape[1]
    dlogits_TE = score_TE.new_empty(t, e, dtype=dtype)
    if t:
        _backward[(t,)](
            expert_TR,
            score_TE,
            dweight_TR,
            dscore_TE,
            dlogits_TE,
            0 if dscore_TE is None else dscore_TE.stride(0),
            scale,
            E=e,
            R=r,
            BE=triton.next_power_of_2(e),
            BR=triton.next_power_of_2(r),
            RENORMALIZE=renormalize,
            num_warps=WARPS,
        )
    return dlogits_TE


@triton.jit
def _backward(
    expert_p,
    score_p,
    dweight_p,
    dscore_p,
    dlogits_p,
    dscore_stride,
    scale,
    E: tl.constexpr,
    R: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    scale = tl.full([], scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    e_ = tl.arange(0, BE)
    r_ = tl.arange(0, BR)
    score_E = tl.load(score_p + row * E + e_, mask=e_ < E, other=0.0)
    ds_E = tl.zeros([BE], tl.float32)
    if dscore_p is not None:
        ds_E += tl.load(dscore_p + row * dscore_stride + e_, mask=e_ < E, other=0.0)
    if dweight_p is not None:
        shift = tl.zeros([], tl.float32)
        if RENORMALIZE:
            expert_R = tl.load(expert_p + row * R + r_, mask=r_ < R, other=0)
            chosen_R = tl.load(score_p + row * E + expert_R, mask=r_ < R, other=0.0)
            dweight_R = tl.load(dweight_p + row * R + r_, mask=r_ < R, other=0.0)
            total = tl.sum(chosen_R, axis=0) + 1e-20
            shift = tl.sum(dweight_R * (chosen_R / total), axis=0)
            scale = scale / total
        for r in range(R):
            expert = tl.load(expert_p + row * R + r)
            dweight = tl.load(dweight_p + row * R + r)
            ds_E += tl.where(e_ == expert, (dweight - shift) * scale, 0.0)
    dlogits_E = ds_E * (score_E * (1.0 - score_E))
    out_at = dlogits_p + row * E + e_
    tl.store(out_at, dlogits_E.to(dlogits_p.dtype.element_ty), mask=e_ < E)
