"""The norms forward: a program normalises a tile of rows, read once in loads of 16 bytes.

Legend: M rows of a tile, D normalised width.

Floats become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import sigmoid, uses_ptx
from perilune.kernels.norm.triton_rows import Rows, blocks, strides

TILE = 4096
ELEMENTS = 32


def forward(x: Rows, gate: Rows | None, weight_D: Tensor, eps: float) -> Tensor:
    """The norm of `x`, contiguous."""
    y_D = torch.empty_like(x.x_D, memory_format=torch.contiguous_format)
    operands = [x] if gate is None else [x, gate]
    block = blocks(TILE, ELEMENTS, *operands)
    if block.num_rows:
        _forward[(block.num_tiles,)](
            x.x_D,
            None if gate is None else gate.x_D,
            weight_D,
            y_D,
            block.num_rows,
            *strides(x, block.group),
            *strides(operands[-1], block.group),
            eps,
            D=weight_D.shape[0],
            G=block.group,
            BM=block.height,
            BD=block.width,
            PTX=uses_ptx(y_D.device),
            num_warps=block.num_warps,
        )
    return y_D


@triton.jit
def row_starts(m_, outer, inner, G: tl.constexpr):
    """Where rows begin, in elements."""
    if G == 1:
        return m_.to(tl.int64) * inner
    return (m_ // G).to(tl.int64) * outer + (m_ % G).to(tl.int64) * inner


@triton.jit
def _forward(
    x_p,
    gate_p,
    weight_p,
    y_p,
    num_rows,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    eps,
    D: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
):
    eps = tl.full([], eps, tl.float32)
    m_ = tl.program_id(0) * BM + tl.arange(0, BM)
    d_ = tl.arange(0, BD)[None, :]
    here_MD = (m_ < num_rows)[:, None] & (d_ < D)
    x_at = x_p + row_starts(m_, x_outer, x_inner, G)[:, None] + d_
    x_MD = tl.load(x_at, mask=here_MD, other=0.0).to(tl.float32)
    w_1D = tl.load(weight_p + d_, mask=d_ < D, other=0.0)
    y_MD = x_MD * tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / D + eps)[:, None]
    dtype: tl.constexpr = y_p.dtype.element_ty
    if gate_p is not None:
        gate_at = gate_p + row_starts(m_, gate_outer, gate_inner, G)[:, None] + d_
        gate_MD = tl.load(gate_at, mask=here_MD, other=0.0).to(tl.float32)
        y_MD = y_MD * w_1D.to(tl.float32) * sigmoid(gate_MD, PTX)
    else:
        y_MD = y_MD.to(dtype).to(tl.float32) * w_1D.to(dtype).to(tl.float32)
    tl.store(y_p + m_.to(tl.int64)[:, None] * D + d_, y_MD.to(dtype), mask=here_MD)
