"""SiTU-GLU and SwiGLU on a GPU, with gradients.

Legend: ... any leading shape, T rows, I intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.row_major import row_major
from perilune.kernels.situ import reference
from perilune.kernels.situ.triton_backward import backward
from perilune.kernels.situ.triton_forward import forward


def situ_glu(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """As `reference.situ_glu`; fp64 runs the reference."""
    if gate_up_2I.dtype == torch.float64:
        return reference.situ_glu(gate_up_2I, beta, linear_beta)
    assert gate_up_2I.shape[-1] % 2 == 0, gate_up_2I.shape
    return _Glu.apply(gate_up_2I, beta, linear_beta)


def _rows(x: Tensor) -> Tensor:
    """As rows that lie in one piece each, apart from each other as they are where that works."""
    return row_major(x.reshape(-1, x.shape[-1]))


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up_2I: Tensor, beta: float | None, linear_beta: float | None
    ) -> Tensor:
        ctx.save_for_backward(gate_up_2I)
        ctx.caps = beta, linear_beta
        y_TI = forward(_rows(gate_up_2I), beta, linear_beta)
        return y_TI.view(*gate_up_2I.shape[:-1], y_TI.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_I: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_2I,) = ctx.saved_tensors
        grad = backward(_rows(gate_up_2I), *ctx.caps, _rows(dy_I))
        return grad.view(gate_up_2I.shape), None, None
