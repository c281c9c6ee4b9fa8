"""SiTU-GLU of few tokens as one loop. Legend: T tokens, I intermediate width."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.common.cpu_jit import jit, sigmoid, tanh
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.situ import reference

UNCAPPED = np.float32(np.nan)
"""Stands for no cap inside compiled loops."""


def situ_glu(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """As `reference.situ_glu`."""
    if gate_up_2I.dim() != 2 or not few_tokens(gate_up_2I):
        return reference.situ_glu(gate_up_2I, beta, linear_beta)
    y_TI = gate_up_2I.new_empty(gate_up_2I.shape[0], gate_up_2I.shape[1] // 2)
    assert gate_up_2I.shape[1] % 2 == 0, gate_up_2I.shape
    _situ_glu(gate_up_2I.contiguous().numpy(), cap(beta), cap(linear_beta), y_TI.numpy())
    return y_TI


def cap(value: float | None) -> np.float32:
    """As compiled loops take it."""
    return UNCAPPED if value is None else np.float32(value)


@jit
def glu(gate, up, beta, linear_beta):
    """One element; caps of `UNCAPPED`, which equals nothing, are left out."""
    capped = beta * tanh(gate / beta) if beta == beta else gate
    linear = linear_beta * tanh(up / linear_beta) if linear_beta == linear_beta else up
    return capped * sigmoid(gate) * linear


@jit
def _situ_glu(gate_up_T2I, beta, linear_beta, y_TI):
    width = y_TI.shape[1]
    for t in range(y_TI.shape[0]):
        for i in range(width):
            y_TI[t, i] = glu(gate_up_T2I[t, i], gate_up_T2I[t, width + i], beta, linear_beta)
