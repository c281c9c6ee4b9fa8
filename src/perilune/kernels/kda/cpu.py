"""One token of KDA as one loop.

Legend: N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.common.cpu_jit import exp, jit, sigmoid
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.kda import reference

UNBOUNDED = 0.0
"""Stands for the softplus gate inside the loop."""
_L2_EPS = np.float32(reference.L2_EPS)


def kda_decode(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    state_NHKV: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """As `reference.kda_decode`."""
    inputs = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log_H, dt_bias_HK)
    if not few_tokens(q_NHK) or not state_NHKV.is_contiguous():
        return reference.kda_decode(*inputs, state_NHKV, lower_bound)
    o_NHV = v_NHV.new_empty(v_NHV.shape)
    arrays = (x.contiguous().numpy() for x in inputs)
    _kda_decode(*arrays, state_NHKV.numpy(), np.float32(lower_bound or UNBOUNDED), o_NHV.numpy())
    return o_NHV


@jit
def _kda_decode(
    q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log_H, dt_bias_HK, state_NHKV, lower_bound, o_NHV
):
    heads, width, values = state_NHKV.shape[1:]
    decay_K = np.empty(width, np.float32)
    delta_V = np.empty(values, np.float32)
    for n in range(state_NHKV.shape[0]):
        for h in range(heads):
            state_KV = state_NHKV[n, h]
            q_squares = k_squares = np.float32(0)
            rate = exp(A_log_H[h])
            for i in range(width):
                q_squares += q_NHK[n, h, i] * q_NHK[n, h, i]
                k_squares += k_NHK[n, h, i] * k_NHK[n, h, i]
                z = z_NHK[n, h, i] + dt_bias_HK[h, i]
                decay_K[i] = exp(_log_decay(z, rate, lower_bound))
            q_scale = 1 / np.sqrt((q_squares + _L2_EPS) * np.float32(width))
            k_scale = 1 / np.sqrt(k_squares + _L2_EPS)
            delta_V[:] = v_NHV[n, h]
            for i in range(width):
                k = k_NHK[n, h, i] * k_scale
                for j in range(values):
                    state_KV[i, j] *= decay_K[i]
                    delta_V[j] -= k * state_KV[i, j]
            beta = sigmoid(b_NH[n, h])
            o_NHV[n, h] = 0
            for i in range(width):
                written = beta * k_NHK[n, h, i] * k_scale
                q = q_NHK[n, h, i] * q_scale
                for j in range(values):
                    state_KV[i, j] += written * delta_V[j]
                    o_NHV[n, h, j] += q * state_KV[i, j]


@jit
def _log_decay(z, rate, lower_bound):
    if lower_bound != UNBOUNDED:
        return lower_bound * sigmoid(z * rate)
    return -rate * (z if z > np.float32(20) else np.log1p(exp(z)))
