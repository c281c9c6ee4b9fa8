"""RMS norms in as few kernels as possible: with few tokens each costs more than its arithmetic.

Legend: ... any leading shape, D normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.constant import constant
from perilune.kernels.norm import reference


def inverse_rms(x_D: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), the last axis kept."""
    norm = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True)
    mean = torch.addcmul(constant(eps, x_D.dtype), norm, norm, value=1 / x_D.shape[-1])
    return mean.rsqrt()


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`; below fp32 the reference runs."""
    if x_D.dtype != weight_D.dtype or x_D.dtype.itemsize < 4:
        return reference.rms_norm(x_D, weight_D, eps)
    return x_D * inverse_rms(x_D, eps) * weight_D


def gated_rms_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.gated_rms_norm`; below fp32 the reference runs."""
    if not x_D.dtype == gate_D.dtype == weight_D.dtype or x_D.dtype.itemsize < 4:
        return reference.gated_rms_norm(x_D, gate_D, weight_D, eps)
    return x_D * inverse_rms(x_D, eps) * weight_D * torch.sigmoid(gate_D)
