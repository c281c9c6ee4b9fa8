"""y = x W^T. Legend: T tokens, I input columns, O output rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product in the dtype of x; a narrower weight is widened first."""
    return functional.linear(x_TI, weight_OI.to(x_TI.dtype))


def scores(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product in fp32, or what is wider: narrower sums would decide between experts."""
    return linear(x_TI.to(torch.promote_types(torch.float32, x_TI.dtype)), weight_OI)
