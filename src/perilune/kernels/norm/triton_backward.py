"""The norms backward: rows are normalised again, so that forward keeps nothing but its inputs.

Legend: M rows of a tile, D normalised width, P programs.

Floats become fp32 inside, since a compiled graph hands them over in fp64.

With n = x r, r the inverse root mean square, and dn the gradient of n: dx = r (dn - n mean(dn n)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import sigmoid, uses_ptx
from perilune.kernels.norm.triton_forward import row_starts
from perilune.kernels.norm.triton_rows import Blocks, Rows, blocks, strides

TILE = 2048
ELEMENTS = 16
PREFETCHED_BYTES = 32768
"""Largest row that is loaded two ahead: all of them have to fit into shared memory."""
TILES_AT_MOST = 16
WIDE_ROWS_AT_MOST = 32
ENOUGH_PROGRAMS = 256


class NormGradients(NamedTuple):
    x_D: Tensor
    gate_D: Tensor | None
    weight_D: Tensor
    """fp32."""


def backward(x: Rows, gate: Rows | None, weight_D: Tensor, eps: float, dy: Rows) -> NormGradients:
    """Of operands of one shape, with `dy` the gradient of the norm."""
    operands = [x, dy] if gate is None else [x, dy, gate]
    block = blocks(TILE, ELEMENTS, *operands)
    tiles = _tiles_of_a_program(block)
    programs = triton.cdiv(block.num_tiles, tiles)
    dx_D = torch.empty_like(x.x_D, memory_format=torch.contiguous_format)
    dgate_D = None
    if gate is not None:
        dgate_D = torch.empty_like(gate.x_D, memory_format=torch.contiguous_format)
    dweight_PD = x.x_D.new_empty(programs, weight_D.shape[0], dtype=torch.float32)
    if programs:
        _backward[(programs,)](
            x.x_D,
            None if gate is None else gate.x_D,
            dy.x_D,
            weight_D,
            dx_D,
            dgate_D,
            dweight_PD,
            block.num_rows,
            tiles,
            *strides(x, block.group),
            *strides(operands[-1], block.group),
            *strides(dy, block.group),
            eps,
            D=weight_D.shape[0],
            G=block.group,
            BM=block.height,
            BD=block.width,
            PTX=uses_ptx(dx_D.device),
            STAGES=_stages(block, x.x_D.element_size()),
            num_warps=block.num_warps,
        )
    return NormGradients(dx_D, dgate_D, dweight_PD.sum(0))


def _tiles_of_a_program(block: Blocks) -> int:
    """Each program leaves a sum of the weight's gradient: few, but enough to occupy a card."""
    most = TILES_AT_MOST if block.height > 1 else WIDE_ROWS_AT_MOST
    return max(1, min(most, block.num_tiles // ENOUGH_PROGRAMS))


def _stages(block: Blocks, element_bytes: int) -> int:
    """Few programs with wide rows fit at a time, so they load ahead; many cover for each other."""
    wide = block.height == 1 and block.width * element_bytes <= PREFETCHED_BYTES
    return 3 if wide else 1


@triton.jit
def _backward(
    x_p,
    gate_p,
    dy_p,
    weight_p,
    dx_p,
    dgate_p,
    dweight_p,
    num_rows,
    tiles,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    dy_outer,
    dy_inner,
    eps,
    D: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype: tl.constexpr = x_p.dtype.element_ty
    eps = tl.full([], eps, tl.float32)
    d_ = tl.arange(0, BD)[None, :]
    w_1D = tl.load(weight_p + d_, mask=d_ < D, other=0.0)
    if gate_p is None:
        w_1D = w_1D.to(dtype)
    w_1D = w_1D.to(tl.float32)
    dw_MD = tl.zeros([BM, BD], tl.float32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        m_ = (tl.program_id(0) * tiles + i) * BM + tl.arange(0, BM)
        here_MD = (m_ < num_rows)[:, None] & (d_ < D)
        x_at = x_p + row_starts(m_, x_outer, x_inner, G)[:, None] + d_
        x_MD = tl.load(x_at, mask=here_MD, other=0.0)
        dy_at = dy_p + row_starts(m_, dy_outer, dy_inner, G)[:, None] + d_
        dy_MD = tl.load(dy_at, mask=here_MD, other=0.0)
        if gate_p is not None:
            gate_at = gate_p + row_starts(m_, gate_outer, gate_inner, G)[:, None] + d_
            gate_MD = tl.load(gate_at, mask=here_MD, other=0.0)
        x_MD = x_MD.to(tl.float32)
        dy_MD = dy_MD.to(tl.float32)
        r_M1 = tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / D + eps)[:, None]
        n_MD = x_MD * r_M1
        out_at = m_.to(tl.int64)[:, None] * D + d_
        if gate_p is not None:
            s_MD = sigmoid(gate_MD.to(tl.float32), PTX)
            dy_MD *= s_MD
            dw_MD += dy_MD * n_MD
            dn_MD = dy_MD * w_1D
            dgate_MD = dn_MD * n_MD * (1.0 - s_MD)
            tl.store(dgate_p + out_at, dgate_MD.to(dgate_p.dtype.element_ty), mask=here_MD)
        else:
            dw_MD += dy_MD * n_MD.to(dtype).to(tl.float32)
            dn_MD = dy_MD * w_1D
        mean_M1 = (tl.sum(dn_MD * n_MD, axis=1) / D)[:, None]
        dx_MD = r_M1 * (dn_MD - n_MD * mean_M1)
        tl.store(dx_p + out_at, dx_MD.to(dtype), mask=here_MD)
    dweight_at = dweight_p + tl.program_id(0).to(tl.int64) * D + tl.arange(0, BD)
    tl.store(dweight_at, tl.sum(dw_MD, axis=0), mask=tl.arange(0, BD) < D)
