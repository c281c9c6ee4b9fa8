"""The product by cuBLAS, a well-kept library for just this.

Legend: T tokens, I input columns, O output rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from perilune.core.errors import UnsupportedError


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `reference.linear`.

    Raises:
        UnsupportedError: fp32 products are allowed to drop to TF32, which keeps 10 bits of 23.
    """
    if x_TI.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        raise UnsupportedError(
            "fp32 products would be computed in TF32:"
            " torch.backends.cuda.matmul.allow_tf32 has to stay False"
        )
    return functional.linear(x_TI, weight_OI.to(x_TI.dtype))
