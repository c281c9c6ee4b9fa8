"""SiTU-GLU forward: gates and ups are read in loads of 16 bytes, each once.

Legend: T tokens, I intermediate width, M rows and I columns of a tile.

Floats become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, exp2, reciprocal, sigmoid, uses_ptx

TILE = 2048
WIDEST_TILE = 1024


class Blocks(NamedTuple):
    height: int
    width: int
    programs: int


def blocks(tile: int, num_rows: int, width: int) -> Blocks:
    """Tiles of about `tile` elements."""
    columns = min(WIDEST_TILE, triton.next_power_of_2(width))
    rows = max(1, tile // columns)
    return Blocks(rows, columns, triton.cdiv(num_rows, rows) * triton.cdiv(width, columns))


def is_rounded(x: Tensor) -> bool:
    """Whether `tanh.approx` may stand for tanh: its 11 bits are rounded to 8 anyway, and half as
    many special instructions keep to the memory's pace."""
    return x.dtype == torch.bfloat16 and uses_ptx(x.device)


def forward(gate_up_T2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """The GLU of rows of stride 1, contiguous."""
    t, i = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    y_TI = gate_up_T2I.new_empty(t, i)
    block = blocks(TILE, t, i)
    if block.programs:
        _forward[(block.programs,)](
            gate_up_T2I,
            y_TI,
            t,
            i,
            gate_up_T2I.stride(0),
            beta,
            linear_beta,
            BM=block.height,
            BI=block.width,
            PTX=uses_ptx(y_TI.device),
            FAST=is_rounded(y_TI),
            num_warps=4,
        )
    return y_TI


@triton.jit
def tanh(x, PTX: tl.constexpr, FAST: tl.constexpr):
    """tanh(x) and its slope.

    Near zero an odd polynomial, fitted to a relative error of 5e-9 below 0.625; beyond, by the
    exponential, whose sum with one would lose small arguments.
    """
    if FAST:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return t, 1.0 - t * t
    size = tl.abs(x)
    rest = 2.0 * reciprocal(1.0 + exp2(size * (2.0 * LOG2_E), PTX), PTX)
    z = x * x
    p = 0.02065058678615117 - 0.005717044512840417 * z
    p = 0.13331491284927027 + z * (p * z - 0.053743497916600026)
    near = x + x * (z * (z * p - 0.3333328392520616))
    far = tl.where(x < 0, rest - 1.0, 1.0 - rest)
    return tl.where(size < 0.625, near, far), rest * (2.0 - rest)


@triton.jit
def capped(x, beta, PTX: tl.constexpr, FAST: tl.constexpr):
    """beta tanh(x / beta) and its slope; without a cap x and 1."""
    if beta is None:
        y, slope = x, tl.full(x.shape, 1.0, tl.float32)
    else:
        cap = tl.full([], beta, tl.float32)
        t, slope = tanh(x * (1.0 / cap), PTX, FAST)
        y = cap * t
    return y, slope


@triton.jit
def place(num_rows, width, BM: tl.constexpr, BI: tl.constexpr):
    """Rows (int64), columns and what of them is there, of this program's tile."""
    across = tl.cdiv(width, BI)
    m_ = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    i_ = (tl.program_id(0) % across) * BI + tl.arange(0, BI)[None, :]
    return m_.to(tl.int64)[:, None], i_, (m_ < num_rows)[:, None] & (i_ < width)


@triton.jit
def _forward(
    gate_up_p,
    y_p,
    num_rows,
    width,
    row_stride,
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
    up_MI, _ = capped(up_MI, linear_beta, PTX, FAST)
    linear_MI, _ = capped(gate_MI, beta, PTX, FAST)
    y_MI = linear_MI * sigmoid(gate_MI, PTX) * up_MI
    tl.store(y_p + m_M1 * width + i_1I, y_MI.to(y_p.dtype.element_ty), mask=here_MI)
