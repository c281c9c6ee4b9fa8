"""Routed experts of bf16 or fp32 weights on a GPU.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from perilune.kernels.common.row_major import row_major
from perilune.kernels.experts import grouped, triton_grouped
from perilune.kernels.experts.triton_combine import combine
from perilune.kernels.experts.triton_plain import (
    Tile,
    plain_down,
    plain_gate_up,
    plain_tile_for,
)
from perilune.kernels.experts.triton_schedule import plan

DTYPES = (torch.bfloat16, torch.float32)
MOST_TOKENS = 64
"""Of a tile: an expert that has more is bound by arithmetic, where torch's grouped products win."""


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As the reference; gradients, and many tokens of bf16, by torch's grouped products."""
    pairs, num_experts = expert_TR.numel(), w13_E2IL.shape[0]
    tile = plain_tile_for(pairs, num_experts, x_TL.dtype)
    other = other_form(tile, x_TL, weight_TR, w13_E2IL, w2_ELI)
    if other is not None:
        return other(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)
    if not x_TL.shape[0]:
        return torch.empty_like(x_TL)
    x_TL = row_major(x_TL)
    w13_E2IL, w2_ELI = w13_E2IL.contiguous(), w2_ELI.contiguous()
    who = plan(expert_TR, num_experts, tile.tokens)
    hidden_PI = plain_gate_up(x_TL, who, w13_E2IL, (beta, linear_beta), tile)
    out_PL = plain_down(hidden_PI, who.tile_I3, w2_ELI, tile)
    return combine(out_PL, who.place_TR, weight_TR.contiguous(), x_TL.dtype)


def other_form(tile: Tile, x_TL: Tensor, *others: Tensor) -> Callable[..., Tensor] | None:
    """What serves where the programs of this file do not: no gradients, and few tokens of bf16."""
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TL, *others))
    in_bf16 = x_TL.dtype == torch.bfloat16
    if is_compiling() or x_TL.dtype not in DTYPES or (graded and not in_bf16):
        return grouped.experts
    return triton_grouped.experts if in_bf16 and (graded or tile.tokens > MOST_TOKENS) else None
