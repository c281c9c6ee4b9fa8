"""The read inside of a compiled graph: two ops that a compiler does not look into.

Legend: T packed tokens, D model width, N committed blocks, M = N + 1 sources, the running sum
last, S 2 M + 2 statistics.

A custom op returns no None: what is not asked for is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.attn_res.triton_backward import backward
from perilune.kernels.attn_res.triton_forward import forward
from perilune.kernels.common.row_major import row_major


def rows_of(x: Tensor | None) -> Tensor | None:
    return None if x is None else row_major(x)


def read(
    sources: Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None,
    weight_D: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor | None]:
    """As `triton.attn_res`: one node of a graph, and one of its backward graph."""
    found = _forward(list(sources), query_D, eps, update_TD, weight_D, norm_eps)
    return found[0], None if update_TD is None else found[1]


@torch.library.custom_op("perilune::attn_res", mutates_args=())
def _forward(
    sources: Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None,
    weight_D: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = [row_major(x) for x in sources], query_D, eps, rows_of(update_TD), weight_D
    mixed = forward(*operands, norm_eps, keep=True)
    assert mixed.stats_ST is not None
    partial_TD = mixed.h_TD.new_empty(0) if mixed.partial_TD is None else mixed.partial_TD
    return mixed.h_TD, partial_TD, mixed.stats_ST


@_forward.register_fake
def _(
    sources: Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None,
    weight_D: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    first = sources[0]
    h_TD = first.new_empty(first.shape)
    partial_TD = first.new_empty(0) if update_TD is None else first.new_empty(first.shape)
    return h_TD, partial_TD, first.new_empty(2 * len(sources) + 2, len(first), dtype=torch.float32)


@torch.library.custom_op("perilune::attn_res_backward", mutates_args=())
def _backward(
    sources: Sequence[Tensor],
    query_D: Tensor,
    weight_D: Tensor | None,
    stats_ST: Tensor,
    dh_TD: Tensor,
    dpartial_TD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dsources_MTD = dh_TD.new_empty(len(sources), *dh_TD.shape)
    operands = [row_major(x) for x in sources], query_D, weight_D, stats_ST
    grads = backward(*operands, row_major(dh_TD), rows_of(dpartial_TD), dsources_MTD.unbind())
    dweight_D = query_D.new_empty(0)
    if weight_D is not None and grads.weight_D is not None:
        dweight_D = grads.weight_D.to(weight_D.dtype)
    return dsources_MTD, grads.query_D.to(query_D.dtype), dweight_D


@_backward.register_fake
def _(
    sources: Sequence[Tensor],
    query_D: Tensor,
    weight_D: Tensor | None,
    stats_ST: Tensor,
    dh_TD: Tensor,
    dpartial_TD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dweight_D = query_D.new_empty(0) if weight_D is None else torch.empty_like(weight_D)
    return dh_TD.new_empty(len(sources), *dh_TD.shape), torch.empty_like(query_D), dweight_D


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query_D, _, update_TD, weight_D, _ = inputs
    partial_TD = sources[-1] if update_TD is None else output[1]
    ctx.save_for_backward(partial_TD, query_D, weight_D, output[2], *sources[:-1])
    ctx.is_updated = update_TD is not None


def _gradients(ctx: Any, dh_TD: Tensor, dpartial_TD: Tensor, _: Tensor) -> tuple[Any, ...]:
    partial_TD, query_D, weight_D, stats_ST, *blocks = ctx.saved_tensors
    others = dpartial_TD if ctx.is_updated else None
    operands = [*blocks, partial_TD], query_D, weight_D, stats_ST
    dsources_MTD, dquery_D, dweight_D = _backward(*operands, dh_TD, others)
    dsources = list(dsources_MTD.unbind())
    dupdate_TD = dsources[-1] if ctx.is_updated else None
    return dsources, dquery_D, None, dupdate_TD, None if weight_D is None else dweight_D, None


_forward.register_autograd(_gradients, setup_context=_save)
