"""RMSNorm with its weight. Legend: ... any leading shape, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.kernels.registry import resolve

rms_norm = resolve("rms_norm")

LATENT_EPS = 1e-6
"""eps of the two MLA latent norms: a class default of the released code, not `rms_norm_eps`."""


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_D: Tensor) -> Tensor:
        return rms_norm(x_D, self.weight, self.eps)
