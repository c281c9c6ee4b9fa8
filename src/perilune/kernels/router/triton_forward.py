"""The choice forward: a warp finds the best experts of a token one by one.

Legend: T tokens, E experts, R experts a token, B bins of a histogram; of the tile that a warp
holds: N chunks of 128 experts, G groups (one a lane), J neighbours in a group, L experts of a
group.

A lane keeps the best of its group. Whoever is chosen was the best of some lane, whose group is
then scored once more, an expert a lane, for the best of those that come after.

Floats become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import uses_ptx
from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally
from perilune.kernels.router.triton_scores import NONE, fine_sigmoid, sortable, sorted_back

LANES: tl.constexpr = tl.constexpr(32)
TOGETHER: tl.constexpr = tl.constexpr(4)
"""Experts that a lane reads at once."""
CHUNK: tl.constexpr = tl.constexpr(128)


def forward(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_active: int,
    renormalize: bool,
    scale: float,
    tally: Tally | None,
) -> Routes:
    """Of logits of stride 1: contiguous."""
    t, e = logits_TE.shape
    expert_TR = logits_TE.new_empty(t, num_active, dtype=torch.int64)
    weight_TR = logits_TE.new_empty(t, num_active, dtype=torch.float32)
    if t:
        _forward[(t,)](
            logits_TE,
            bias_E,
            expert_TR,
            weight_TR,
            *(tally or Tally(None, None, None)),
            logits_TE.stride(0),
            scale,
            E=e,
            R=num_active,
            B=1 if tally is None else tally.count_EB.shape[1],
            BN=triton.next_power_of_2(triton.cdiv(e, CHUNK.value)),
            BR=triton.next_power_of_2(num_active),
            RENORMALIZE=renormalize,
            PTX=uses_ptx(logits_TE.device),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return Routes(expert_TR, weight_TR)


@triton.jit
def _forward(
    logits_p,
    bias_p,
    expert_p,
    weight_p,
    count_p,
    load_p,
    counted_p,
    row_stride,
    scale,
    E: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PTX: tl.constexpr,
):
    scale = tl.full([], scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    logits_p += row * row_stride
    g_ = tl.arange(0, LANES)
    n_ = tl.arange(0, BN)[None, :, None]
    j_ = tl.arange(0, TOGETHER)[None, None, :]
    r_ = tl.arange(0, BR)
    e_GNJ = (g_ * TOGETHER)[:, None, None] + n_ * CHUNK + j_
    here_GNJ = e_GNJ < E
    logit_GNJ = tl.load(logits_p + e_GNJ, mask=here_GNJ, other=0.0).to(tl.float32)
    score_GNJ = fine_sigmoid(logit_GNJ, PTX)
    bias_GNJ = tl.load(bias_p + e_GNJ, mask=here_GNJ, other=0.0).to(tl.float32)
    key_GNJ = tl.where(here_GNJ, sortable(score_GNJ + bias_GNJ, PTX), NONE)
    best_G = tl.max(tl.max(key_GNJ, axis=2), axis=1)
    is_best_GNJ = key_GNJ == best_G[:, None, None]
    first_GNJ = tl.where(is_best_GNJ, n_ * CHUNK + j_, BN * CHUNK)
    at_G = tl.min(tl.min(first_GNJ, axis=2), axis=1) + g_ * TOGETHER

    l_ = tl.arange(0, BN * TOGETHER)
    of_group_0_L = l_ // TOGETHER * CHUNK + l_ % TOGETHER
    expert_R = tl.zeros([BR], tl.int32)
    for r in range(R):
        best = tl.max(best_G, axis=0)
        chosen = tl.min(tl.where(best_G == best, at_G, BN * CHUNK), axis=0)
        expert_R = tl.where(r_ == r, chosen, expert_R)
        group = (chosen & (CHUNK - 1)) // TOGETHER
        e_L = of_group_0_L + group * TOGETHER
        logit_L = tl.load(logits_p + e_L, mask=e_L < E, other=0.0).to(tl.float32)
        bias_L = tl.load(bias_p + e_L, mask=e_L < E, other=0.0).to(tl.float32)
        key_L = sortable(fine_sigmoid(logit_L, PTX) + bias_L, PTX)
        is_left_L = (key_L < best) | ((key_L == best) & (e_L > chosen))
        key_L = tl.where(is_left_L & (e_L < E), key_L, NONE)
        next_best = tl.max(key_L, axis=0)
        next_at = tl.min(tl.where(key_L == next_best, e_L, BN * CHUNK), axis=0)
        best_G = tl.where(g_ == group, next_best, best_G)
        at_G = tl.where(g_ == group, next_at, at_G)

    weight_R = tl.load(logits_p + expert_R, mask=r_ < R, other=0.0).to(tl.float32)
    weight_R = tl.where(r_ < R, fine_sigmoid(weight_R, PTX), 0.0)
    if RENORMALIZE:
        weight_R = weight_R / (tl.sum(weight_R, axis=0) + 1e-20)
    tl.store(weight_p + row * R + r_, weight_R * scale, mask=r_ < R)
    tl.store(expert_p + row * R + r_, expert_R.to(tl.int64), mask=r_ < R)

    if count_p is not None:
        is_counted = True
        if counted_p is not None:
            is_counted = tl.load(counted_p + row) != 0
        if is_counted:
            low = tl.min(tl.where(here_GNJ, bias_GNJ, float("inf"))) - 1.0
            width = (tl.max(tl.where(here_GNJ, bias_GNJ, -float("inf"))) + 1.0 - low) / B
            alpha = sorted_back(tl.max(best_G, axis=0))
            bins_GNJ = tl.div_rn(alpha - score_GNJ - low, tl.full(e_GNJ.shape, width, tl.float32))
            bin_GNJ = tl.minimum(tl.maximum(bins_GNJ.to(tl.int32), 0), B - 1)
            tl.atomic_add(count_p + e_GNJ * B + bin_GNJ, 1, mask=here_GNJ, sem="relaxed")
            tl.atomic_add(load_p + expert_R, 1, mask=r_ < R, sem="relaxed")
