"""The choice backward: the logits of a token's experts have a gradient, all others none.

Legend: T tokens, E experts, R experts a token.

With s the chosen scores, t = sum s + 1e-20 and weights w = s / t scale: ds = (dw - sum dw s / t)
scale / t, and not renormalised ds = dw scale. A logit's gradient is ds s (1 - s).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import uses_ptx
from perilune.kernels.router.triton_scores import fine_sigmoid


def backward(
    expert_TR: Tensor, logits_TE: Tensor, dweight_TR: Tensor, renormalize: bool, scale: float
) -> Tensor:
    """The gradient of the logits (of stride 1), from that of the weights (contiguous)."""
    (t, e), r = logits_TE.shape, expert_TR.shape[1]
    dlogits_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    if t:
        _backward[(t,)](
            expert_TR,
            logits_TE,
            dweight_TR,
            dlogits_TE,
            logits_TE.stride(0),
            scale,
            E=e,
            R=r,
            BE=triton.next_power_of_2(e),
            BR=triton.next_power_of_2(r),
            RENORMALIZE=renormalize,
            PTX=uses_ptx(logits_TE.device),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return dlogits_TE


@triton.jit
def _backward(
    expert_p,
    logits_p,
    dweight_p,
    dlogits_p,
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
    dlogits_p += row * E
    dtype: tl.constexpr = dlogits_p.dtype.element_ty
    tl.store(dlogits_p + e_, tl.zeros([BE], dtype), mask=e_ < E)
    expert_R = tl.load(expert_p + row * R + r_, mask=r_ < R, other=0)
    ds_R = tl.load(dweight_p + row * R + r_, mask=r_ < R, other=0.0)
    logit_R = tl.load(logits_p + row * row_stride + expert_R, mask=r_ < R, other=0.0)
    score_R = fine_sigmoid(logit_R.to(tl.float32), PTX)
    if RENORMALIZE:
        total = tl.sum(tl.where(r_ < R, score_R, 0.0), axis=0) + 1e-20
        ds_R -= tl.sum(ds_R * (score_R / total), axis=0)
        scale = scale / total
    dlogit_R = ds_R * scale * (score_R * (1.0 - score_R))
    # Zeros first: other lanes wrote them.
    tl.debug_barrier()
    tl.store(dlogits_p + expert_R, dlogit_R.to(dtype), mask=r_ < R)
