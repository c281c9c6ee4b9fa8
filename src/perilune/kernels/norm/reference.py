"""RMS norms. Legend: ... any leading shape, D normalised width."""

from __future__ import annotations

import torch
from torch import Tensor


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.promote_types(torch.float32, x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps): normalised in fp32, cast to the dtype of x, then weighted."""
    return _normalised(x_D, eps).to(x_D.dtype) * weight_D.to(x_D.dtype)


def gated_rms_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm(x) * w * sigmoid(gate): norm first, then gate, one cast at the end (KDA output)."""
    y = _normalised(x_D, eps)
    return (y * weight_D.to(y.dtype) * torch.sigmoid(gate_D.to(y.dtype))).to(x_D.dtype)
