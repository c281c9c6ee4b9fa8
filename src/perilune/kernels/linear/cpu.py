"""Few tokens times a matrix that is held as bf16: bound by reading the matrix, so half the bytes.

Legend: T tokens, I input columns, O output rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.common.cpu_jit import bf16_to_fp32, jit
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.linear import reference


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `reference.linear`; the loop serves few fp32 tokens and a bf16 weight, exactly widened."""
    if not _serves(x_TI, weight_OI):
        return reference.linear(x_TI, weight_OI)
    return _product(x_TI, weight_OI)


def scores(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `reference.scores`; the loop serves few tokens, of bf16 too, and a bf16 weight."""
    wide_TI = x_TI.float() if x_TI.dtype is torch.bfloat16 else x_TI
    if not _serves(wide_TI, weight_OI):
        return reference.scores(x_TI, weight_OI)
    return _product(wide_TI, weight_OI)


def _serves(x_TI: Tensor, weight_OI: Tensor) -> bool:
    narrow = weight_OI.dtype is torch.bfloat16 and weight_OI.is_contiguous()
    return x_TI.dim() == 2 and narrow and few_tokens(x_TI)


def _product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    assert x_TI.shape[1] == weight_OI.shape[1], (x_TI.shape, weight_OI.shape)
    y_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    weight = weight_OI.contiguous().view(torch.uint16).numpy()
    _linear(x_TI.contiguous().numpy(), weight, y_TO.numpy())
    return y_TO


@jit
def _linear(x_TI, weight_OI, y_TO):
    for o in range(weight_OI.shape[0]):
        for t in range(x_TI.shape[0]):
            total = np.float32(0)
            for i in range(weight_OI.shape[1]):
                total += x_TI[t, i] * bf16_to_fp32(weight_OI[o, i])
            y_TO[t, o] = total
