"""Random op inputs for conformance cases."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.registry import Tolerance

# fp32 references against a float64 truth: a few hundred roundings deep, never thousands.
FP32 = {torch.float32: Tolerance(forward=2e-5, backward=2e-4)}
EXACT_FP32 = {torch.float32: Tolerance(forward=2e-6, backward=2e-5)}
# Products of bf16 operands with fp32 sums: each intermediate is rounded once, by 2^-9 at most.
BF16 = {torch.bfloat16: Tolerance(forward=1e-2, backward=2e-2)}


def normal(
    generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> Tensor:
    """N(0, scale) leaf that asks for a gradient."""
    return (scale * torch.randn(shape, generator=generator, dtype=dtype)).requires_grad_()
