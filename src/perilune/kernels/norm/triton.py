"""The RMS norms on a GPU, with gradients.

Legend: ... any leading shape, D normalised width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.norm import reference
from perilune.kernels.norm.triton_backward import backward
from perilune.kernels.norm.triton_forward import forward
from perilune.kernels.norm.triton_rows import WIDEST, rows_of


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`; fp64 and rows that no program holds run the reference."""
    if x_D.dtype == torch.float64 or x_D.shape[-1] > WIDEST:
        return reference.rms_norm(x_D, weight_D, eps)
    assert weight_D.shape == x_D.shape[-1:], (weight_D.shape, x_D.shape)
    return _Norm.apply(x_D, None, weight_D.contiguous(), eps)


def gated_rms_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.gated_rms_norm`; fp64 and rows that no program holds run the reference."""
    if x_D.dtype == torch.float64 or x_D.shape[-1] > WIDEST:
        return reference.gated_rms_norm(x_D, gate_D, weight_D, eps)
    assert weight_D.shape == x_D.shape[-1:], (weight_D.shape, x_D.shape)
    assert gate_D.shape == x_D.shape, (gate_D.shape, x_D.shape)
    return _Norm.apply(x_D, gate_D, weight_D.contiguous(), eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_D: Tensor, gate_D: Tensor | None, weight_D: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x_D, gate_D, weight_D)
        ctx.eps = eps
        gate = None if gate_D is None else rows_of(gate_D)
        return forward(rows_of(x_D), gate, weight_D, eps).view(x_D.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_D: Tensor) -> tuple[Tensor | None, ...]:
        x_D, gate_D, weight_D = ctx.saved_tensors
        gate = None if gate_D is None else rows_of(gate_D)
        grads = backward(rows_of(x_D), gate, weight_D, ctx.eps, rows_of(dy_D))
        dgate = None if gate_D is None else grads.gate_D.view(gate_D.shape)
        return grads.x_D.view(x_D.shape), dgate, grads.weight_D.to(weight_D.dtype), None
