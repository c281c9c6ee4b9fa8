"""Expanded prefill from tensors and lengths, and as nodes of a compiled graph.

Which tiles there are is a table on the device, kept between calls. A graph can neither make nor
keep it, so that its nodes take lengths, and find their table when they run.

Legend: T packed queries, S keys, B rows, L tokens of a row, H heads, K query width = N own + R
shared key channels, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.common.row_major import row_major
from perilune.kernels.mla.triton_prefill_backward import backward, tiles_of
from perilune.kernels.mla.triton_prefill_forward import Attended, Operands, forward, tile_of
from perilune.kernels.mla.triton_prefill_table import Documents, documents, tiles


def forward_of(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    segment_BL: Tensor | None,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> Attended:
    """Of operands that lie anywhere."""
    x = _operands(q_THK, k_SHN, shared_SR, v_SHV, scale)
    tile = tile_of(q_THK.dtype)
    sizes = tile.queries, tile.keys
    table = tiles(tuple(lengths), tuple(key_lengths), *sizes, q_THK.device)
    return forward(x, table.query_I4, _documents(segment_BL, lengths), tile)


def backward_of(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    segment_BL: Tensor | None,
    o_THV: Tensor,
    lse_HT: Tensor,
    do_THV: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four operands, each contiguous."""
    x = _operands(q_THK, k_SHN, shared_SR, v_SHV, scale)
    of_queries, of_keys = tiles_of(q_THK.dtype)
    sizes = of_queries.queries, of_keys.keys
    table = tiles(tuple(lengths), tuple(key_lengths), *sizes, q_THK.device)
    out = Attended(o_THV.contiguous(), lse_HT.contiguous())
    grads = backward(x, out, row_major(do_THV), table, _documents(segment_BL, lengths))
    return grads._replace(shared_SR=grads.shared_SR.to(shared_SR.dtype))


def _operands(
    q_THK: Tensor, k_SHN: Tensor, shared_SR: Tensor, v_SHV: Tensor, scale: float
) -> Operands:
    return Operands(*map(row_major, (q_THK, k_SHN, shared_SR, v_SHV)), scale)


def _documents(segment_BL: Tensor | None, lengths: Sequence[int]) -> Documents | None:
    return documents(Packing(lengths=tuple(lengths), segment_BL=segment_BL))


def attend(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    segment_BL: Tensor | None,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """One node of a graph, and one of its backward graph."""
    operands = (q_THK, k_SHN, shared_SR, v_SHV, segment_BL)
    return _forward(*operands, lengths, key_lengths, scale)[0]


@torch.library.custom_op("perilune::mla_prefill", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    segment_BL: Tensor | None,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    operands = (q_THK, k_SHN, shared_SR, v_SHV, segment_BL)
    return forward_of(*operands, lengths, key_lengths, scale)


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    q_THK, v_SHV = args[0], args[3]
    (t, h, _), v = q_THK.shape, v_SHV.shape[2]
    return q_THK.new_empty(t, h, v), q_THK.new_empty(h, t, dtype=torch.float32)


@torch.library.custom_op("perilune::mla_prefill_backward", mutates_args=())
def _backward(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    segment_BL: Tensor | None,
    o_THV: Tensor,
    lse_HT: Tensor,
    do_THV: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (q_THK, k_SHN, shared_SR, v_SHV, segment_BL, o_THV, lse_HT, do_THV)
    return backward_of(*tensors, lengths, key_lengths, scale)


@_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lengths, key_lengths, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.layout = lengths, key_lengths, scale


def _gradients(ctx: Any, do_THV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, do_THV, *ctx.layout), *(None,) * 4


_forward.register_autograd(_gradients, setup_context=_save)
