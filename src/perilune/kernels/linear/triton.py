"""The product that scores experts, on a GPU, with gradients.

Legend: T tokens, I input columns, O output rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.row_major import row_major
from perilune.kernels.linear import cublas, triton_scores, triton_scores_many

FEW_TOKENS = 512
"""Up to here reading the weight, or the launch, is what takes time: programs share the columns."""


def scores(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `reference.scores`; cuBLAS has fp64, other dimensions, and the graphs of a compiler.

    Raises:
        UnsupportedError: as `cublas.linear`.
    """
    wide = torch.promote_types(torch.float32, x_TI.dtype)
    if x_TI.dim() != 2 or wide != torch.float32 or torch.compiler.is_compiling():
        return cublas.linear(x_TI.to(wide), weight_OI)
    assert x_TI.shape[1] == weight_OI.shape[1], (x_TI.shape, weight_OI.shape)
    return _Scores.apply(x_TI, weight_OI)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        few = x_TI.shape[0] <= FEW_TOKENS
        run = triton_scores.scores if few else triton_scores_many.scores
        return run(_operand(x_TI), _operand(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        dx_TI = dweight_OI = None
        if ctx.needs_input_grad[0]:
            dx_TI = cublas.linear(dy_TO, weight_OI.t()).to(x_TI.dtype)
        if ctx.needs_input_grad[1]:
            dweight_OI = cublas.linear(dy_TO.t(), x_TI.t()).to(weight_OI.dtype)
        return dx_TI, dweight_OI


def _operand(x: Tensor) -> Tensor:
    """In a dtype that the kernel reads, rows in one piece each."""
    return row_major(x if x.dtype in (torch.bfloat16, torch.float32) else x.float())
