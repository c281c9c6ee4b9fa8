"""Where the loops compiled for a CPU serve."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKENS = 16
"""Up to here a product is bound by reading its weight; more tokens are bound by arithmetic, and
then torch's kernels, on all threads, win."""


def fp32_inference(*tensors: Tensor) -> bool:
    """Whether a compiled loop can serve: fp32 throughout, and no gradient asked for."""
    return not torch.is_grad_enabled() and all(x.dtype is torch.float32 for x in tensors)


def few_tokens(x_T: Tensor, *others: Tensor) -> bool:
    """Whether a compiled loop serves `x_T` best."""
    return x_T.shape[0] <= MAX_TOKENS and fp32_inference(x_T, *others)
