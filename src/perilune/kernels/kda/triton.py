"""KDA in chunks on a GPU, with gradients.

Legend: T packed tokens, N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import reference
from perilune.kernels.kda.reference import KDAOut
from perilune.kernels.kda.triton_backward import backward
from perilune.kernels.kda.triton_forward import KDAInputs, chain, prepare
from perilune.kernels.kda.triton_table import chunk_table

WIDTHS = (16, 32, 64, 128)
"""Key and value widths whose state fits one program; others run the reference."""


def kda_chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    packing: Packing,
    lower_bound: float | None = None,
    state_NHKV: Tensor | None = None,
) -> KDAOut:
    """As `reference.kda_chunk`; fp64 and other widths run the reference."""
    tensors = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    widths = (k_THK.shape[2], v_THV.shape[2])
    if q_THK.dtype == torch.float64 or not all(width in WIDTHS for width in widths):
        return reference.kda_chunk(*tensors, packing, lower_bound, state_NHKV)
    table = chunk_table(packing, q_THK.device)
    rows = [_row_major(x) for x in tensors[:5]]
    gate = [x.contiguous() for x in tensors[5:]]
    before = None if state_NHKV is None else state_NHKV.contiguous()
    o_THV, after = _KDAChunk.apply(*rows, *gate, before, table, lower_bound)
    return KDAOut(o_THV, None if packing.segment_BL is not None else after)


def _row_major(x_TH: Tensor) -> Tensor:
    """Only tokens may be strided: a projection's slice goes in as it is."""
    inner = x_TH[0]
    return x_TH if inner.is_contiguous() else x_TH.contiguous()


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, state, table, lower_bound = args
        x = KDAInputs(*tensors, lower_bound)
        o_THV, after, _ = chain(x, prepare(x, table), table, state)
        ctx.save_for_backward(*tensors, state)
        ctx.table, ctx.lower_bound = table, lower_bound
        return o_THV, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, state = ctx.saved_tensors
        x, table = KDAInputs(*tensors, ctx.lower_bound), ctx.table
        grads = backward(x, table, state, do_THV.contiguous(), d_after.contiguous())
        like = [g.to(t.dtype) for g, t in zip(grads[:7], tensors, strict=True)]
        return *like, None if state is None else grads.state_NHKV.to(state.dtype), None, None
