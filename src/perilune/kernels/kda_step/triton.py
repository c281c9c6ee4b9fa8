"""One step of a KDA layer in one launch: a program owns one head of one sequence.

Legend: N sequences, L tokens of each, T = N L tokens, S slots of the pools, H heads, K key width,
V value width, C = 2 H K + H V channels, W = 4 taps.

The state [K, V] is read into registers once and written once; convolution, gates and the gated norm
are done beside it, since the step is bound by those bytes. Reading memory through k and through q
share one pass over the state: with S' the decayed state, o = q S' + (q . k) delta.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.common.row_major import row_major
from perilune.kernels.common.triton_math import launches_early
from perilune.kernels.kda.reference import L2_EPS
from perilune.kernels.kda_step import reference

NUM_WARPS = 4
WIDTHS = (16, 32, 64, 128)
"""Key and value widths that one program holds; others run the reference."""


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
    """As `reference.kda_step`; other widths, tap counts or strided pools run the reference."""
    inputs = (qkv_TC, z_THK, b_TH, gate_THV, conv_CW, A_log_H, dt_bias_HK, norm_V)
    h, k, v = state_SHKV.shape[1:]
    pools_fit = window_SWC.is_contiguous() and state_SHKV.is_contiguous()
    if k not in WIDTHS or v not in WIDTHS or conv_CW.shape[1] != 4 or not pools_fit:
        return reference.kda_step(*inputs, window_SWC, state_SHKV, slot_N, lower_bound, eps, keep_N)
    rows = [x.flatten(1) for x in (qkv_TC, z_THK, b_TH, gate_THV)]
    rows = [row_major(x) for x in rows]
    o_THV = gate_THV.new_empty(gate_THV.shape)
    n = slot_N.shape[0]
    if n == 0:
        return o_THV
    slots = slot_N.contiguous()
    overlaps = launches_early(qkv_TC.device)
    launch: Any = _step[(n * h,)]  # other targets refuse an option that only NVIDIA's have
    launch(
        *rows,
        *(x.contiguous() for x in (conv_CW, A_log_H, dt_bias_HK, norm_V)),
        window_SWC,
        state_SHKV,
        slots,
        slots if keep_N is None else keep_N.contiguous(),
        o_THV,
        *(x.stride(0) for x in rows),
        0.0 if lower_bound is None else lower_bound,
        eps,
        L=qkv_TC.shape[0] // n,
        H=h,
        K=k,
        V=v,
        BOUNDED=lower_bound is not None,
        KEEPS_ALL=keep_N is None,
        OVERLAPS=overlaps,
        L2_EPS=L2_EPS,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return o_THV


@triton.jit
def _step(
    qkv_p,
    z_p,
    b_p,
    gate_p,
    conv_p,
    A_log_p,
    dt_bias_p,
    norm_p,
    window_p,
    state_p,
    slot_p,
    keep_p,
    o_p,
    qkv_stride,
    z_stride,
    b_stride,
    gate_stride,
    lower_bound,
    eps,
    L: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BOUNDED: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
    L2_EPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    k_ = tl.arange(0, K)
    v_ = tl.arange(0, V)
    first = n.to(tl.int64) * L
    o_p += h * V + v_
    slot = tl.load(slot_p + n).to(tl.int64)
    C: tl.constexpr = 2 * H * K + H * V
    q_channel = h * K + k_
    k_channel = H * K + h * K + k_
    v_channel = 2 * H * K + h * V + v_
    # What needs no slot is on its way while the slot is, and the windows are ahead of the state:
    # the step's vectors are made while the state comes.
    qw0, qw1, qw2, qw3 = _taps(conv_p + q_channel * 4)
    kw0, kw1, kw2, kw3 = _taps(conv_p + k_channel * 4)
    vw0, vw1, vw2, vw3 = _taps(conv_p + v_channel * 4)
    rate = tl.exp(tl.load(A_log_p + h).to(tl.float32))
    dt_bias_K = tl.load(dt_bias_p + h * K + k_).to(tl.float32)
    norm_V = tl.load(norm_p + v_).to(tl.float32)
    qkv_p += first * qkv_stride
    z_p += first * z_stride + h * K + k_
    b_p += first * b_stride + h
    gate_p += first * gate_stride + h * V + v_
    q3 = tl.load(qkv_p + q_channel).to(tl.float32)
    k3 = tl.load(qkv_p + k_channel).to(tl.float32)
    v3 = tl.load(qkv_p + v_channel).to(tl.float32)
    z_K = tl.load(z_p).to(tl.float32)
    b = tl.load(b_p).to(tl.float32)
    gate_V = tl.load(gate_p).to(tl.float32)
    if slot < 0:
        for t in range(L):
            tl.store(o_p + (first + t) * H * V, tl.zeros([V], o_p.dtype.element_ty))
        return
    window_p += slot * 3 * C
    q0, q1, q2 = _window(window_p + q_channel, C)
    k0, k1, k2 = _window(window_p + k_channel, C)
    v0, v1, v2 = _window(window_p + v_channel, C)
    state_at = state_p + (slot * H + h) * K * V + k_[:, None] * V + v_[None, :]
    S_KV = tl.load(state_at).to(tl.float32)
    keep = L if KEEPS_ALL else tl.load(keep_p + n)
    for t in range(L):
        q_K = _silu(q0 * qw0 + q1 * qw1 + q2 * qw2 + q3 * qw3)
        k_K = _silu(k0 * kw0 + k1 * kw1 + k2 * kw2 + k3 * kw3)
        v_V = _silu(v0 * vw0 + v1 * vw1 + v2 * vw2 + v3 * vw3)
        q_K *= (K**-0.5) / tl.sqrt(tl.sum(q_K * q_K, axis=0) + L2_EPS)
        k_K *= 1.0 / tl.sqrt(tl.sum(k_K * k_K, axis=0) + L2_EPS)

        z_K += dt_bias_K
        if BOUNDED:
            log_decay_K = lower_bound * _sigmoid(rate * z_K)
        else:
            log_decay_K = -rate * tl.where(z_K > 20.0, z_K, tl.log(1.0 + tl.exp(z_K)))
        beta = _sigmoid(b)

        S_KV *= tl.exp(log_decay_K)[:, None]
        delta_V = beta * (v_V - tl.sum(k_K[:, None] * S_KV, axis=0))
        o_V = tl.sum(q_K[:, None] * S_KV, axis=0) + tl.sum(q_K * k_K, axis=0) * delta_V
        S_KV += k_K[:, None] * delta_V[None, :]

        o_V *= norm_V / tl.sqrt(tl.sum(o_V * o_V, axis=0) / V + eps)
        o_V *= _sigmoid(gate_V)
        tl.store(o_p + (first + t) * H * V, o_V.to(o_p.dtype.element_ty))

        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3
        if t + 1 == keep:
            tl.store(state_at, S_KV.to(state_p.dtype.element_ty))
            _keep_window(window_p + q_channel, C, q0, q1, q2)
            _keep_window(window_p + k_channel, C, k0, k1, k2)
            _keep_window(window_p + v_channel, C, v0, v1, v2)
        if t + 1 < L:
            qkv_p += qkv_stride
            z_p += z_stride
            b_p += b_stride
            gate_p += gate_stride
            q3 = tl.load(qkv_p + q_channel).to(tl.float32)
            k3 = tl.load(qkv_p + k_channel).to(tl.float32)
            v3 = tl.load(qkv_p + v_channel).to(tl.float32)
            z_K = tl.load(z_p).to(tl.float32)
            b = tl.load(b_p).to(tl.float32)
            gate_V = tl.load(gate_p).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _window(at, C: tl.constexpr):
    """The last three inputs of a convolution, oldest first."""
    x0 = tl.load(at).to(tl.float32)
    x1 = tl.load(at + C).to(tl.float32)
    x2 = tl.load(at + 2 * C).to(tl.float32)
    return x0, x1, x2


@triton.jit
def _taps(at):
    """The weights of a convolution of width 4, that of the oldest input first."""
    w0 = tl.load(at).to(tl.float32)
    w1 = tl.load(at + 1).to(tl.float32)
    w2 = tl.load(at + 2).to(tl.float32)
    w3 = tl.load(at + 3).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _keep_window(at, C: tl.constexpr, x0, x1, x2):
    dtype = at.dtype.element_ty
    tl.store(at, x0.to(dtype))
    tl.store(at + C, x1.to(dtype))
    tl.store(at + 2 * C, x2.to(dtype))
