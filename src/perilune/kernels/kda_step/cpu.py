"""One step of a KDA layer as one loop: it is bound by the states, however many sequences there are.

Legend: N sequences, L tokens of each, T = N L tokens, S slots of the pools, H heads, K key width,
V value width, C = 2 H K + H V channels, W taps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.common.cpu_jit import exp, jit, sigmoid
from perilune.kernels.common.few_tokens import fp32_inference
from perilune.kernels.kda.reference import L2_EPS
from perilune.kernels.kda_step import reference

UNBOUNDED = np.float32(np.nan)
"""Stands for the softplus gate inside the loop."""
_L2_EPS = np.float32(L2_EPS)


def kda_step(
    qkv_TC: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    gate_THV: Tensor,
    conv_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    norm_V: Tensor,
    window_SWC: Tensor,
    state_SHKV: Tensor,
    slot_N: Tensor,
    lower_bound: float | None,
    eps: float,
    keep_N: Tensor | None = None,
) -> Tensor:
    """As `reference.kda_step`."""
    inputs = (qkv_TC, z_THK, b_TH, gate_THV, conv_CW, A_log_H, dt_bias_HK, norm_V)
    pools = (window_SWC, state_SHKV)
    if not fp32_inference(*inputs, *pools) or not all(pool.is_contiguous() for pool in pools):
        return reference.kda_step(*inputs, *pools, slot_N, lower_bound, eps, keep_N)
    _assert_shapes(*inputs, *pools, slot_N)
    o_THV = torch.zeros_like(gate_THV, memory_format=torch.contiguous_format)
    if keep_N is None:
        keep_N = torch.full_like(slot_N, qkv_TC.shape[0] // max(1, slot_N.shape[0]))
    _kda_step(
        *(x.contiguous().numpy() for x in inputs),
        *(x.numpy() for x in pools),
        *(x.contiguous().numpy() for x in (slot_N, keep_N)),
        UNBOUNDED if lower_bound is None else np.float32(lower_bound),
        np.float32(eps),
        o_THV.numpy(),
    )
    return o_THV


def _assert_shapes(qkv_TC, z, b, gate, conv_CW, A_log, dt_bias, norm_V, window, state, slot_N):
    t, c = qkv_TC.shape
    h, k, v = state.shape[1:]
    n = slot_N.shape[0]
    assert t % max(1, n) == 0, (t, n)
    assert c == 2 * h * k + h * v == conv_CW.shape[0], (qkv_TC.shape, conv_CW.shape, state.shape)
    assert z.shape == (t, h, k), z.shape
    assert b.shape == (t, h), b.shape
    assert gate.shape == (t, h, v), gate.shape
    assert A_log.shape == (h,), A_log.shape
    assert dt_bias.shape == (h, k), dt_bias.shape
    assert norm_V.shape == (v,), norm_V.shape
    assert window.shape == (state.shape[0], conv_CW.shape[1] - 1, c), window.shape
    assert n == 0 or int(slot_N.max()) < state.shape[0], (slot_N, state.shape)


@jit
def _kda_step(
    qkv_TC,
    z_THK,
    b_TH,
    gate_THV,
    conv_CW,
    A_log_H,
    dt_bias_HK,
    norm_V,
    window_SWC,
    state_SHKV,
    slot_N,
    keep_N,
    lower_bound,
    eps,
    o_THV,
):
    length = qkv_TC.shape[0] // max(1, slot_N.shape[0])
    heads, width, values = state_SHKV.shape[1:]
    for n in range(slot_N.shape[0]):
        slot = slot_N[n]
        if slot < 0:
            continue
        window_WC, state_HKV = window_SWC[slot].copy(), state_SHKV[slot].copy()
        for t in range(n * length, (n + 1) * length):
            y_C = _conv(qkv_TC[t], conv_CW, window_WC)
            for h in range(heads):
                q = y_C[h * width : (h + 1) * width]
                k = y_C[(heads + h) * width : (heads + h + 1) * width]
                first = 2 * heads * width + h * values
                v = y_C[first : first + values]
                rate = exp(A_log_H[h])
                decay = np.empty(width, np.float32)
                for i in range(width):
                    z = z_THK[t, h, i] + dt_bias_HK[h, i]
                    decay[i] = exp(_log_decay(z, rate, lower_bound))
                _recur(q, k, v, decay, sigmoid(b_TH[t, h]), state_HKV[h], o_THV[t, h])
                _gated_norm(gate_THV[t, h], norm_V, eps, o_THV[t, h])
            if t + 1 - n * length == keep_N[n]:
                window_SWC[slot], state_SHKV[slot] = window_WC, state_HKV


@jit
def _conv(x_C, conv_CW, window_WC):
    """silu of the convolution's newest output; the window moves on."""
    channels, width = conv_CW.shape
    y_C = np.empty(channels, np.float32)
    for c in range(channels):
        total = x_C[c] * conv_CW[c, width - 1]
        for w in range(width - 1):
            total += window_WC[w, c] * conv_CW[c, w]
        y_C[c] = total * sigmoid(total)
    for w in range(width - 2):
        window_WC[w] = window_WC[w + 1]
    if width > 1:
        window_WC[width - 2] = x_C
    return y_C


@jit
def _log_decay(z, rate, lower_bound):
    if lower_bound == lower_bound:
        return lower_bound * sigmoid(z * rate)
    return -rate * (z if z > np.float32(20) else np.log1p(exp(z)))


@jit
def _recur(q_K, k_K, v_V, decay_K, beta, state_KV, o_V):
    width, values = state_KV.shape
    q_squares = k_squares = np.float32(0)
    for i in range(width):
        q_squares += q_K[i] * q_K[i]
        k_squares += k_K[i] * k_K[i]
    q_scale = 1 / np.sqrt((q_squares + _L2_EPS) * np.float32(width))
    k_scale = 1 / np.sqrt(k_squares + _L2_EPS)
    delta_V = v_V.copy()
    for i in range(width):
        k = k_K[i] * k_scale
        for j in range(values):
            state_KV[i, j] *= decay_K[i]
            delta_V[j] -= k * state_KV[i, j]
    o_V[:] = 0
    for i in range(width):
        written = beta * k_K[i] * k_scale
        q = q_K[i] * q_scale
        for j in range(values):
            state_KV[i, j] += written * delta_V[j]
            o_V[j] += q * state_KV[i, j]


@jit
def _gated_norm(gate_V, norm_V, eps, o_V):
    squares = np.float32(0)
    for j in range(o_V.shape[0]):
        squares += o_V[j] * o_V[j]
    inverse = 1 / np.sqrt(squares / np.float32(o_V.shape[0]) + eps)
    for j in range(o_V.shape[0]):
        o_V[j] *= inverse * norm_V[j] * sigmoid(gate_V[j])
