"""RMS norms of few tokens as one loop.

Legend: ... any leading shape, M rows, D normalised width.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.common.cpu_jit import jit, sigmoid
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.norm import reference


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    if not few_tokens(x_D, weight_D):
        return reference.rms_norm(x_D, weight_D, eps)
    assert weight_D.shape == x_D.shape[-1:], (weight_D.shape, x_D.shape)
    x_MD = x_D.reshape(-1, x_D.shape[-1]).contiguous()
    y_MD = x_MD.new_empty(x_MD.shape)
    _rms_norm(x_MD.numpy(), weight_D.contiguous().numpy(), np.float32(eps), y_MD.numpy())
    return y_MD.view(x_D.shape)


def gated_rms_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `reference.gated_rms_norm`."""
    if not few_tokens(x_D, gate_D, weight_D) or gate_D.shape != x_D.shape:
        return reference.gated_rms_norm(x_D, gate_D, weight_D, eps)
    assert weight_D.shape == x_D.shape[-1:], (weight_D.shape, x_D.shape)
    x_MD = x_D.reshape(-1, x_D.shape[-1]).contiguous()
    gate_MD = gate_D.reshape(x_MD.shape).contiguous()
    y_MD = x_MD.new_empty(x_MD.shape)
    _rms_norm(x_MD.numpy(), weight_D.contiguous().numpy(), np.float32(eps), y_MD.numpy())
    _gate(gate_MD.numpy(), y_MD.numpy())
    return y_MD.view(x_D.shape)


@jit
def _rms_norm(x_MD, weight_D, eps, y_MD):
    width = x_MD.shape[1]
    for m in range(x_MD.shape[0]):
        squares = np.float32(0)
        for d in range(width):
            squares += x_MD[m, d] * x_MD[m, d]
        inverse = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for d in range(width):
            y_MD[m, d] = x_MD[m, d] * inverse * weight_D[d]


@jit
def _gate(gate_MD, y_MD):
    for m in range(gate_MD.shape[0]):
        for d in range(gate_MD.shape[1]):
            y_MD[m, d] *= sigmoid(gate_MD[m, d])
