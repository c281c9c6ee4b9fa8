"""KDA in chunks on a GPU, with gradients.

Legend: T packed tokens, N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.packing import Cuts, Packing, check_cuts
from perilune.kernels.kda import reference, triton_graph
from perilune.kernels.kda.reference import KDAOut
from perilune.kernels.kda.triton_backward import backward
from perilune.kernels.kda.triton_forward import KDAInputs, chain, prepare
from perilune.kernels.kda.triton_split import segment_length, split_chain
from perilune.kernels.kda.triton_table import ChunkTable, chunk_table

WIDTHS = (16, 32, 64, 128)
"""Key and value widths whose state fits one program; others run the reference."""
CONFIGS = ({"block": 64}, {"block": 128}, {"segment": 64})
"""All that the sizes may choose; each is checked by itself."""


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
    cuts: Cuts | None = None,
    *,
    block: int | None = None,
    segment: int | None = None,
) -> KDAOut:
    """As `reference.kda_chunk`; fp64, other widths and no token at all run the reference.

    `block` value columns a program and pieces of `segment` tokens, where given, stand in for what
    fits the sizes best.
    """
    tensors = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    heads, k, v = *k_THK.shape[1:], v_THV.shape[2]
    served = k in WIDTHS and v in WIDTHS and q_THK.shape[0] > 0
    if q_THK.dtype == torch.float64 or not served:
        return reference.kda_chunk(*tensors, packing, lower_bound, state_NHKV, cuts)
    if cuts is None and torch.compiler.is_compiling():
        return triton_graph.kda_chunk(*tensors, packing, lower_bound, state_NHKV)
    check_cuts(cuts, packing)
    segment = segment or segment_length(packing, heads, v)
    wanted = None if cuts is None else tuple(map(tuple, cuts))
    table = chunk_table(packing, q_THK.device, wanted, segment)
    rows = [row_major(x) for x in tensors[:5]]
    gate = [x.contiguous() for x in tensors[5:]]
    before = None if state_NHKV is None else state_NHKV.contiguous()
    how = Chosen(table, lower_bound, segment is not None, cuts is not None, block)
    o_THV, after, cut_EHKV = _KDAChunk.apply(*rows, *gate, before, how)
    return KDAOut(o_THV, None if packing.segment_BL is not None else after, cut_EHKV)


def row_major(x_TH: Tensor) -> Tensor:
    """Only tokens may be strided: a projection's slice goes in as it is."""
    return x_TH if x_TH[:1].is_contiguous() else x_TH.contiguous()


class Chosen(NamedTuple):
    table: ChunkTable
    lower_bound: float | None
    split: bool
    cut: bool
    block: int | None


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        *tensors, state, how = args
        table = how.table
        x = KDAInputs(*tensors, how.lower_bound)
        tiles = prepare(x, table)
        if how.split:
            o_THV, after, pieces = split_chain(x, tiles, table, state, block=how.block)
        else:
            shape = (table.num_pieces, *x.sizes)
            pieces = x.q_THK.new_empty(shape, dtype=torch.float32) if how.cut else None
            o_THV, after = chain(x, tiles, table.of_pieces, state, pieces, block=how.block)
        cut_EHKV = pieces[table.cut_E] if how.cut else None
        if cut_EHKV is not None:
            ctx.mark_non_differentiable(cut_EHKV)
        ctx.save_for_backward(*tensors, state)
        ctx.how = how
        return o_THV, after, cut_EHKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, d_after: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        *tensors, state = ctx.saved_tensors
        x = KDAInputs(*tensors, ctx.how.lower_bound)
        given = do_THV.contiguous(), d_after.contiguous()
        grads = backward(x, ctx.how.table, state, *given, block=ctx.how.block)
        like = [g.to(t.dtype) for g, t in zip(grads[:7], tensors, strict=True)]
        return *like, None if state is None else grads.state_NHKV.to(state.dtype), None
