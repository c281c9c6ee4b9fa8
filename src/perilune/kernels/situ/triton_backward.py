"""SiTU-GLU backward: both branches are computed again, so that forward keeps nothing but its input.

Legend: T tokens, I intermediate width, M rows and I columns of a tile.

With c and u the capped gate and up, and s = sigmoid(gate):
dgate = dy u s (c' + c (1 - s)) and dup = dy c s u'.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import sigmoid, uses_ptx
from perilune.kernels.situ.triton_forward import blocks, capped, is_rounded, place

TILE = 1024


def backward(
    gate_up_T2I: Tensor, beta: float | None, linear_beta: float | None, dy_TI: Tensor
) -> Tensor:
    """The gradient of `gate_up_T2I`, contiguous; rows of stride 1."""
    t, i = dy_TI.shape
    dgate_up_T2I = gate_up_T2I.new_empty(t, 2 * i)
    block = blocks(TILE, t, i)
    if block.programs:
        _backward[(block.programs,)](
            gate_up_T2I,
            dy_TI,
            dgate_up_T2I,
            t,
            i,
            gate_up_T2I.stride(0),
            dy_TI.stride(0),
            beta,
            linear_beta,
            BM=block.height,
            BI=block.width,
            PTX=uses_ptx(dy_TI.device),
            FAST=is_rounded(dgate_up_T2I),
            num_warps=4,
        )
    return dgate_up_T2I


@triton.jit
def _backward(
    gate_up_p,
    dy_p,
    dgate_up_p,
    num_rows,
    width,
    row_stride,
    dy_stride,
    beta,
    linear_beta,
    BM: tl.constexpr,
    BI: tl.constexpr,
    PTX: tl.constexpr,
    FAST: tl.constexpr,
):
    m_M1, i_1I, here_MI = place(num_rows, width, BM, BI)
    gate_at = gate_up_p + m_M1 * row_stride + i_1I
    gate_MI = tl.load(gate_at, mask=here_MI, other=0.0).to(tl.float32)
    up_MI = tl.load(gate_at + width, mask=here_MI, other=0.0).to(tl.float32)
    dy_at = dy_p + m_M1 * dy_stride + i_1I
    dy_MI = tl.load(dy_at, mask=here_MI, other=0.0).to(tl.float32)
    u_MI, u_slope_MI = capped(up_MI, linear_beta, PTX, FAST)
    c_MI, c_slope_MI = capped(gate_MI, beta, PTX, FAST)
    s_MI = sigmoid(gate_MI, PTX)
    dys_MI = dy_MI * s_MI
    dgate_MI = dys_MI * u_MI * (c_slope_MI + c_MI * (1.0 - s_MI))
    dup_MI = dys_MI * c_MI * u_slope_MI
    dtype: tl.constexpr = dgate_up_p.dtype.element_ty
    out_at = dgate_up_p + m_M1 * (2 * width) + i_1I
    tl.store(out_at, dgate_MI.to(dtype), mask=here_MI)
    tl.store(out_at + width, dup_MI.to(dtype), mask=here_MI)
