"""y = x W^T. Legend: T tokens, I input columns, O output rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product in the dtype of x; a narrower weight is widened first."""
    return functional.linear(x_TI, weight_OI.to(x_TI.dtype))
