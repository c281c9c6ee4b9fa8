"""SiTU-GLU in few kernels. Legend: ... any leading shape, I intermediate width."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.constant import constant
from perilune.kernels.situ import reference


def situ_glu(gate_up_2I: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """As `reference.situ_glu`; below fp32 or without an up cap the reference runs."""
    if linear_beta is None or gate_up_2I.dtype.itemsize < 4:
        return reference.situ_glu(gate_up_2I, beta, linear_beta)
    width = gate_up_2I.shape[-1] // 2
    dtype = gate_up_2I.dtype
    inverse = constant((1 / beta,) * width + (1 / linear_beta,) * width, dtype)
    gate, up = torch.tanh(gate_up_2I * inverse).split(width, dim=-1)
    raw = gate_up_2I[..., :width]
    return gate * torch.sigmoid(raw) * up * constant(beta * linear_beta, dtype)
