"""Routed experts in bf16 with gradients: torch's grouped products between Triton's row movers.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width,
P padded rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from perilune.kernels.common.row_major import row_major
from perilune.kernels.experts.grouped import ALIGN, Groups, groups_of
from perilune.kernels.experts.triton_combine import combine
from perilune.kernels.experts.triton_spread import spread, spread_weighted
from perilune.kernels.registry import resolve

situ_glu = resolve("situ")


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As `grouped.experts` for bf16 tokens, each row of which is moved once each way."""
    groups = groups_of(expert_TR, w13_E2IL.shape[0])
    x_PL = _Spread.apply(x_TL, groups)
    hidden_P2I = grouped_mm(x_PL, w13_E2IL.bfloat16().mT, offs=groups.end_E)
    hidden_PI = situ_glu(hidden_P2I, beta, linear_beta)
    out_PL = grouped_mm(hidden_PI, w2_ELI.bfloat16().mT, offs=groups.end_E)
    return _Combine.apply(out_PL, weight_TR, groups)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        rows_TL = row_major(x_TL)
        return spread(rows_TL, groups.slot_TR, groups.start_E, groups.end_E, groups.rows, ALIGN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_PL: Tensor) -> tuple[Tensor, None]:
        return combine(dx_PL.contiguous(), ctx.groups.slot_TR, None, dx_PL.dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_PL: Tensor, weight_TR: Tensor, groups: Groups) -> Tensor:
        out_PL, weight_TR = out_PL.contiguous(), weight_TR.contiguous()
        ctx.save_for_backward(out_PL, weight_TR)
        ctx.groups = groups
        return combine(out_PL, groups.slot_TR, weight_TR, out_PL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TL: Tensor) -> tuple[Tensor, Tensor, None]:
        (out_PL, weight_TR), groups = ctx.saved_tensors, ctx.groups
        dout_PL, dweight_TR = spread_weighted(
            row_major(dy_TL),
            groups.slot_TR,
            groups.start_E,
            groups.end_E,
            weight_TR,
            out_PL,
            ALIGN,
        )
        return dout_PL, dweight_TR.to(weight_TR.dtype), None
