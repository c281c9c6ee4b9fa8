"""RMSNorm as its definition reads: one vector, one channel at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    rows = [
        torch.stack([w * u for w, u in zip(weight_D, _normalised(row_D, eps), strict=True)])
        for row_D in x_D.reshape(-1, x_D.shape[-1])
    ]
    return torch.stack(rows).view(x_D.shape)


def gated_rms_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    open_D = 1 / (1 + torch.exp(-gate_D))
    return rms_norm(x_D, weight_D, eps) * open_D


def _normalised(x_D: Tensor, eps: float) -> list[Tensor]:
    mean_square = torch.stack([x * x for x in x_D]).sum() / len(x_D)
    return [x / torch.sqrt(mean_square + eps) for x in x_D]
