"""Attention over residual sources on a GPU, with gradients.

Legend: T packed tokens, D model width, N committed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.attn_res import reference, triton_graph
from perilune.kernels.attn_res.reference import Read
from perilune.kernels.attn_res.triton_backward import backward
from perilune.kernels.attn_res.triton_forward import forward
from perilune.kernels.attn_res.triton_graph import rows_of
from perilune.kernels.common.row_major import row_major

WIDEST = 16384
"""Elements of a row that one program still holds."""
MOST_BLOCKS = 15


def attn_res(
    partial_TD: Tensor,
    blocks_NTD: Tensor | Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None = None,
    weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Read:
    """As `reference.attn_res`; fp64, sources of several dtypes, more axes, and rows or blocks that
    no program holds run the reference."""
    if not _serves(partial_TD, blocks_NTD, query_D, update_TD):
        return reference.attn_res(
            partial_TD, blocks_NTD, query_D, eps, update_TD, weight_D, norm_eps
        )
    assert query_D.shape == partial_TD.shape[1:], (query_D.shape, partial_TD.shape)
    assert all(x.shape == partial_TD.shape for x in blocks_NTD), partial_TD.shape
    weight_D = None if weight_D is None else weight_D.contiguous()
    if torch.compiler.is_compiling():
        operands = [*blocks_NTD, partial_TD], query_D.contiguous(), eps, update_TD, weight_D
        return Read(*triton_graph.read(*operands, norm_eps))
    blocks = [blocks_NTD] if isinstance(blocks_NTD, Tensor) else blocks_NTD
    operands = partial_TD, update_TD, query_D.contiguous(), weight_D
    if torch.is_grad_enabled():
        return Read(*_Read.apply(*operands, eps, norm_eps, *blocks))
    sources = [row_major(x) for x in (*_one_by_one(blocks), partial_TD)]
    mixed = forward(sources, operands[2], eps, rows_of(update_TD), weight_D, norm_eps, keep=False)
    return Read(mixed.h_TD, mixed.partial_TD)


def _serves(
    partial_TD: Tensor,
    blocks_NTD: Tensor | Sequence[Tensor],
    query_D: Tensor,
    update_TD: Tensor | None,
) -> bool:
    same = [x for x in (update_TD, *blocks_NTD) if x is not None]
    fits = partial_TD.dim() == 2 and partial_TD.shape[1] <= WIDEST
    fits = fits and len(blocks_NTD) <= MOST_BLOCKS
    is_fp64 = torch.float64 in (partial_TD.dtype, query_D.dtype)
    return fits and not is_fp64 and all(x.dtype == partial_TD.dtype for x in same)


def _one_by_one(blocks: Sequence[Tensor]) -> list[Tensor]:
    """The blocks of tensors [T, D], or of one tensor [N, T, D]."""
    return [each for x in blocks for each in (x.unbind() if x.dim() == 3 else (x,))]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial_TD: Tensor,
        update_TD: Tensor | None,
        query_D: Tensor,
        weight_D: Tensor | None,
        eps: float,
        norm_eps: float,
        *blocks: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        sources = [row_major(x) for x in (*_one_by_one(blocks), partial_TD)]
        operands = sources, query_D, eps, rows_of(update_TD), weight_D
        mixed = forward(*operands, norm_eps, keep=True)
        total_TD = partial_TD if update_TD is None else mixed.partial_TD
        ctx.save_for_backward(total_TD, query_D, weight_D, mixed.stats_ST, *blocks)
        ctx.is_updated = update_TD is not None
        ctx.set_materialize_grads(False)
        return mixed.h_TD, mixed.partial_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dh_TD: Tensor | None, dpartial_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dh_TD is None:
            blocks = [None] * (len(ctx.needs_input_grad) - 6)
            return dpartial_TD, dpartial_TD, None, None, None, None, *blocks
        total_TD, query_D, weight_D, stats_ST, *blocks = ctx.saved_tensors
        dblocks = [x.new_empty(x.shape) for x in blocks]
        dtotal_TD = total_TD.new_empty(total_TD.shape)
        sources = [row_major(x) for x in (*_one_by_one(blocks), total_TD)]
        operands = sources, query_D, weight_D, stats_ST, row_major(dh_TD), rows_of(dpartial_TD)
        grads = backward(*operands, [*_one_by_one(dblocks), dtotal_TD])
        dquery_D = grads.query_D.to(query_D.dtype)
        dweight_D = None if weight_D is None else grads.weight_D.to(weight_D.dtype)
        dupdate_TD = dtotal_TD if ctx.is_updated else None
        return dtotal_TD, dupdate_TD, dquery_D, dweight_D, None, None, *dblocks
