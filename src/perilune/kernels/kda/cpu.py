"""One token of KDA in few kernels.

Legend: N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.constant import constant
from perilune.kernels.kda import reference


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
    """As `reference.kda_decode`; below fp32, or with the unbounded gate, the reference runs."""
    dtype = q_NHK.dtype
    if lower_bound is None or dtype != state_NHKV.dtype or A_log_H.dtype != dtype:
        return reference.kda_decode(
            q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log_H, dt_bias_HK, state_NHKV, lower_bound
        )
    n, h, width = k_NHK.shape
    log_decay = torch.sigmoid((z_NHK + dt_bias_HK) * A_log_H.exp()[:, None])
    decay_NHK = log_decay.mul_(constant(lower_bound, dtype)).exp_()

    qk = torch.stack([q_NHK, k_NHK])
    norm = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
    inverse = torch.addcmul(constant(reference.L2_EPS, dtype), norm, norm).rsqrt_()
    qk = qk.mul_(inverse)
    q, k = qk.view(2, n * h, 1, width).unbind(0)

    state = state_NHKV.mul_(decay_NHK[..., None]).view(n * h, width, -1)
    delta = v_NHV.reshape(n * h, 1, -1) - torch.bmm(k, state)
    written = (k * torch.sigmoid(b_NH).view(n * h, 1, 1)).transpose(1, 2)
    state.baddbmm_(written, delta)
    return torch.bmm(q * constant(width**-0.5, dtype), state).view(n, h, -1)
