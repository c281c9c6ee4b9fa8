"""The choice forward: a warp finds the best experts of a token one by one.

Legend: T tokens, E experts, R experts a token, B bins of a histogram; of a program M tokens (a warp
each), N chunks of 128 experts, G groups (one a lane), J neighbours in a group, L experts of a
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
from perilune.kernels.router.triton_scores import (
    NONE,
    fine_sigmoid,
    higher,
    same_bits,
    sortable,
    sorted_back,
)

LANES: tl.constexpr = tl.constexpr(32)
TOGETHER: tl.constexpr = tl.constexpr(4)
"""Experts that a lane reads at once."""
CHUNK: tl.constexpr = tl.constexpr(128)
TOKENS = 4
"""Of a program: of single warps an SM holds too few, and starts them too slowly."""


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
        _forward[(triton.cdiv(t, TOKENS),)](
            logits_TE,
            bias_E,
            expert_TR,
            weight_TR,
            *(tally or Tally(None, None, None)),
            t,
            logits_TE.stride(0),
            *((0, 0, 0) if tally is None else (*tally.count_EB.stride(), *tally.load_E.stride())),
            scale,
            E=e,
            R=num_active,
            B=1 if tally is None else tally.count_EB.shape[1],
            BN=triton.next_power_of_2(triton.cdiv(e, CHUNK.value)),
            M=TOKENS,
            RENORMALIZE=renormalize,
            PTX=uses_ptx(logits_TE.device),
            num_warps=TOKENS,
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
    num_tokens,
    row_stride,
    count_stride,
    bin_stride,
    load_stride,
    scale,
    E: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    BN: tl.constexpr,
    M: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PTX: tl.constexpr,
):
    scale = tl.full([], scale, tl.float32)
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    is_token_M = row_M < num_tokens
    # A warp without a token does the work of the last one again.
    row_M = tl.minimum(row_M, num_tokens - 1).to(tl.int64)
    logits_M = logits_p + row_M * row_stride
    g_ = tl.arange(0, LANES)
    n_ = tl.arange(0, BN)[None, None, :, None]
    j_ = tl.arange(0, TOGETHER)[None, None, None, :]
    e_GMNJ = (
        (g_ * TOGETHER)[:, None, None, None] + n_ * CHUNK + j_ + tl.zeros([1, M, 1, 1], tl.int32)
    )
    here_GMNJ = e_GMNJ < E
    logit_GMNJ = tl.load(logits_M[None, :, None, None] + e_GMNJ, mask=here_GMNJ, other=0.0)
    score_GMNJ = fine_sigmoid(logit_GMNJ.to(tl.float32), PTX)
    bias_GMNJ = tl.load(bias_p + e_GMNJ, mask=here_GMNJ, other=0.0).to(tl.float32)
    biased_GMNJ = tl.where(here_GMNJ, score_GMNJ + bias_GMNJ, -float("inf"))
    best_GM = tl.reduce(tl.reduce(biased_GMNJ, 3, higher), 2, higher)
    is_best_GMNJ = same_bits(biased_GMNJ, best_GM[:, :, None, None])
    first_GMNJ = tl.where(is_best_GMNJ, n_ * CHUNK + j_, BN * CHUNK)
    at_GM = tl.min(tl.min(first_GMNJ, axis=3), axis=2) + (g_ * TOGETHER)[:, None]
    best_GM = sortable(best_GM, PTX)

    l_ = tl.arange(0, BN * TOGETHER)
    of_group_0_L1 = (l_ // TOGETHER * CHUNK + l_ % TOGETHER)[:, None]
    r_ = tl.arange(0, LANES)[:, None]
    expert_RM = tl.zeros([LANES, M], tl.int32)
    for r in range(R):
        best_M = tl.max(best_GM, axis=0)
        chosen_M = tl.min(tl.where(best_GM == best_M[None, :], at_GM, BN * CHUNK), axis=0)
        expert_RM = tl.where(r_ == r, chosen_M[None, :], expert_RM)
        group_M = (chosen_M & (CHUNK - 1)) // TOGETHER
        e_LM = of_group_0_L1 + (group_M * TOGETHER)[None, :]
        logit_LM = tl.load(logits_M[None, :] + e_LM, mask=e_LM < E, other=0.0).to(tl.float32)
        bias_LM = tl.load(bias_p + e_LM, mask=e_LM < E, other=0.0).to(tl.float32)
        key_LM = sortable(fine_sigmoid(logit_LM, PTX) + bias_LM, PTX)
        is_equal_LM = key_LM == best_M[None, :]
        is_left_LM = (key_LM < best_M[None, :]) | (is_equal_LM & (e_LM > chosen_M[None, :]))
        key_LM = tl.where(is_left_LM & (e_LM < E), key_LM, NONE)
        next_best_M = tl.max(key_LM, axis=0)
        next_at_M = tl.min(tl.where(key_LM == next_best_M[None, :], e_LM, BN * CHUNK), axis=0)
        is_group_GM = g_[:, None] == group_M[None, :]
        best_GM = tl.where(is_group_GM, next_best_M[None, :], best_GM)
        at_GM = tl.where(is_group_GM, next_at_M[None, :], at_GM)

    weight_RM = tl.load(logits_M[None, :] + expert_RM, mask=r_ < R, other=0.0).to(tl.float32)
    weight_RM = tl.where(r_ < R, fine_sigmoid(weight_RM, PTX), 0.0)
    if RENORMALIZE:
        weight_RM = weight_RM / (tl.sum(weight_RM, axis=0) + 1e-20)[None, :]
    choice_RM = row_M[None, :] * R + r_
    tl.store(weight_p + choice_RM, weight_RM * scale, mask=r_ < R)
    tl.store(expert_p + choice_RM, expert_RM.to(tl.int64), mask=r_ < R)

    if count_p is not None:
        is_counted_M = is_token_M
        if counted_p is not None:
            is_counted_M &= tl.load(counted_p + row_M) != 0
        low = tl.min(tl.where(here_GMNJ, bias_GMNJ, float("inf"))) - 1.0
        width = (tl.max(tl.where(here_GMNJ, bias_GMNJ, -float("inf"))) + 1.0 - low) / B
        alpha_M = sorted_back(tl.max(best_GM, axis=0))
        required_GMNJ = alpha_M[None, :, None, None] - score_GMNJ
        bins_GMNJ = tl.div_rn(required_GMNJ - low, tl.full(e_GMNJ.shape, width, tl.float32))
        bin_GMNJ = tl.minimum(tl.maximum(bins_GMNJ.to(tl.int32), 0), B - 1)
        is_one_GMNJ = here_GMNJ & is_counted_M[None, :, None, None]
        count_GMNJ = count_p + e_GMNJ * count_stride + bin_GMNJ * bin_stride
        tl.atomic_add(count_GMNJ, 1, mask=is_one_GMNJ, sem="relaxed")
        is_one_RM = (r_ < R) & is_counted_M[None, :]
        tl.atomic_add(load_p + expert_RM * load_stride, 1, mask=is_one_RM, sem="relaxed")
