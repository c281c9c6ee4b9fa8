"""Where the loops compiled for a CPU serve."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKENS = 8
"""Up to here a product is bound by reading its weight; more tokens are bound by arithmetic, and
then torch's kernels, on all threads, win."""


def few_tokens(x_T: Tensor) -> bool:
    """Whether a compiled loop serves `x_T`: few tokens, fp32, no gradient asked for."""
    return x_T.shape[0] <= MAX_TOKENS and x_T.dtype is torch.float32 and not torch.is_grad_enabled()
