"""The sigmoid gate in one pass: heads are read where a product left them, in any order.

Legend: T tokens, H heads, V value width, C = HV channels, M rows and C channels of a tile.

With s = sigmoid(gate): do = dy s and dgate = dy o s (1 - s).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import sigmoid, uses_ptx

TILE, WIDEST_TILE = 1024, 512
"""Elements of a program: few tokens, too, have to reach every multiprocessor."""


def forward(o_THV: Tensor, gate_TC: Tensor) -> Tensor:
    """[T, C], contiguous; channels have stride 1 in what is read."""
    y_TC = gate_TC.new_empty(gate_TC.shape)
    rows, columns, grid = _tiles(gate_TC)
    if y_TC.numel():
        _forward[grid](
            o_THV,
            gate_TC,
            y_TC,
            o_THV.shape[0],
            *o_THV.stride()[:2],
            gate_TC.stride(0),
            C=gate_TC.shape[1],
            V=o_THV.shape[2],
            BM=rows,
            BC=columns,
            PTX=uses_ptx(y_TC.device),
            num_warps=4,
        )
    return y_TC


def backward(o_THV: Tensor, gate_TC: Tensor, dy_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `o_THV` and `gate_TC`, contiguous."""
    do_THV, dgate_TC = o_THV.new_empty(o_THV.shape), gate_TC.new_empty(gate_TC.shape)
    rows, columns, grid = _tiles(gate_TC)
    if dgate_TC.numel():
        _backward[grid](
            o_THV,
            gate_TC,
            dy_TC,
            do_THV,
            dgate_TC,
            o_THV.shape[0],
            *o_THV.stride()[:2],
            gate_TC.stride(0),
            dy_TC.stride(0),
            C=gate_TC.shape[1],
            V=o_THV.shape[2],
            BM=rows,
            BC=columns,
            PTX=uses_ptx(dy_TC.device),
            num_warps=4,
        )
    return do_THV, dgate_TC


def _tiles(gate_TC: Tensor) -> tuple[int, int, tuple[int]]:
    """Rows and channels of a tile, and how many there are."""
    t, c = gate_TC.shape
    columns = min(WIDEST_TILE, triton.next_power_of_2(max(1, c)))
    rows = max(1, TILE // columns)
    return rows, columns, (triton.cdiv(t, rows) * triton.cdiv(c, columns),)


@triton.jit
def _read(
    o_p, gate_p, num_rows, o_stride, head_stride, gate_stride, C: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rows (int64) and channels of this program, which of them are there; o and the gate, fp32."""
    across: tl.constexpr = (C + BC - 1) // BC
    m_M = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    c_C = (tl.program_id(0) % across) * BC + tl.arange(0, BC)
    o_1C = (c_C // V).to(tl.int64)[None, :] * head_stride + (c_C % V)[None, :]
    here_MC = (m_M < num_rows)[:, None] & (c_C < C)[None, :]
    m_M1, c_1C = m_M[:, None], c_C[None, :]
    o = tl.load(o_p + m_M1 * o_stride + o_1C, mask=here_MC, other=0.0)
    gate = tl.load(gate_p + m_M1 * gate_stride + c_1C, mask=here_MC, other=0.0)
    return m_M1, c_1C, here_MC, o.to(tl.float32), gate.to(tl.float32)


@triton.jit
def _forward(
    o_p,
    gate_p,
    y_p,
    num_rows,
    o_stride,
    head_stride,
    gate_stride,
    C: tl.constexpr,
    V: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    PTX: tl.constexpr,
):
    m_M1, c_1C, here_MC, o, gate = _read(
        o_p, gate_p, num_rows, o_stride, head_stride, gate_stride, C, V, BM, BC
    )
    y = o * sigmoid(gate, PTX)
    tl.store(y_p + m_M1 * C + c_1C, y.to(y_p.dtype.element_ty), mask=here_MC)


@triton.jit
def _backward(
    o_p,
    gate_p,
    dy_p,
    do_p,
    dgate_p,
    num_rows,
    o_stride,
    head_stride,
    gate_stride,
    dy_stride,
    C: tl.constexpr,
    V: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    PTX: tl.constexpr,
):
    m_M1, c_1C, here_MC, o, gate = _read(
        o_p, gate_p, num_rows, o_stride, head_stride, gate_stride, C, V, BM, BC
    )
    dy = tl.load(dy_p + m_M1 * dy_stride + c_1C, mask=here_MC, other=0.0).to(tl.float32)
    s = sigmoid(gate, PTX)
    out_MC = m_M1 * C + c_1C
    tl.store(do_p + out_MC, (dy * s).to(do_p.dtype.element_ty), mask=here_MC)
    dgate = dy * o * s * (1.0 - s)
    tl.store(dgate_p + out_MC, dgate.to(dgate_p.dtype.element_ty), mask=here_MC)
