"""The sigmoid gate on a GPU, with gradients. Legend: T tokens, H heads, V value width, C = HV
channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.row_major import row_major
from perilune.kernels.gate import reference
from perilune.kernels.gate.triton_kernels import backward, forward


def sigmoid_gate(o_THV: Tensor, gate_TC: Tensor) -> Tensor:
    """As `reference.sigmoid_gate`; fp64 runs the reference."""
    if torch.float64 in (o_THV.dtype, gate_TC.dtype):
        return reference.sigmoid_gate(o_THV, gate_TC)
    t, heads, width = o_THV.shape
    assert gate_TC.shape == (t, heads * width), (o_THV.shape, gate_TC.shape)
    return _Gate.apply(o_THV, gate_TC)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o_THV: Tensor, gate_TC: Tensor) -> Tensor:
        ctx.save_for_backward(o_THV, gate_TC)
        return forward(row_major(o_THV), row_major(gate_TC))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor, Tensor]:
        o_THV, gate_TC = ctx.saved_tensors
        return backward(row_major(o_THV), row_major(gate_TC), row_major(dy_TC))
