"""KDA in chunks inside of a compiled graph: two ops that a compiler does not look into.

How sequences are cut into chunks is a table on the device, kept between calls. A graph can neither
make nor keep it, so that the op takes the lengths, and finds its table when it runs.

Legend: T packed tokens, B rows, L tokens of a row, N sequences, H heads, K key width, V value
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.reference import KDAOut
from perilune.kernels.kda.triton_backward import backward
from perilune.kernels.kda.triton_forward import KDAInputs
from perilune.kernels.kda.triton_table import chunk_table


def kda_chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    packing: Packing,
    lower_bound: float | None,
    state_NHKV: Tensor | None,
) -> KDAOut:
    """As `triton.kda_chunk`: one node of a graph, and one of its backward graph."""
    tensors = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    o_THV, after = _forward(
        *tensors, state_NHKV, packing.segment_BL, list(packing.lengths), lower_bound
    )
    return KDAOut(o_THV, None if packing.segment_BL is not None else after)


@torch.library.custom_op("perilune::kda_chunk", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    state_NHKV: Tensor | None,
    segment_BL: Tensor | None,
    lengths: Sequence[int],
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    from perilune.kernels.kda.triton import kda_chunk as eager  # it hands over to this module

    tensors = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    packing = Packing(lengths=tuple(lengths), segment_BL=segment_BL)
    out = eager(*tensors, packing, lower_bound, state_NHKV)
    return out.o_THV, _no_state(q_THK) if out.state_NHKV is None else out.state_NHKV


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    q_THK, v_THV, segment_BL, lengths = args[0], args[2], args[8], args[9]
    o_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format)
    if segment_BL is not None:
        return o_THV, _no_state(q_THK)
    shape = (len(lengths), *q_THK.shape[1:], v_THV.shape[2])
    return o_THV, q_THK.new_empty(shape, dtype=torch.float32)


def _no_state(q_THK: Tensor) -> Tensor:
    """An op's results are tensors: that of rows of documents is an empty one."""
    return q_THK.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("perilune::kda_chunk_backward", mutates_args=())
def _backward(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    state_NHKV: Tensor | None,
    segment_BL: Tensor | None,
    lengths: Sequence[int],
    lower_bound: float | None,
    do_THV: Tensor,
    d_after_NHKV: Tensor,
) -> list[Tensor]:
    """Gradients of the tensors, and of the initial state where there is one."""
    from perilune.kernels.kda.triton import row_major  # as above

    rows = [row_major(x) for x in (q_THK, k_THK, v_THV, z_THK, b_TH)]
    x = KDAInputs(*rows, A_log_H.contiguous(), dt_bias_HK.contiguous(), lower_bound)
    packing = Packing(lengths=tuple(lengths), segment_BL=segment_BL)
    before = None if state_NHKV is None else state_NHKV.contiguous()
    d_after = None if segment_BL is not None else d_after_NHKV.contiguous()
    grads = backward(x, chunk_table(packing, q_THK.device), before, do_THV.contiguous(), d_after)
    inputs = _differentiable(*x[:7], state_NHKV)
    return [g.to(t.dtype) for g, t in zip(grads, inputs, strict=False)]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    contiguous = {"memory_format": torch.contiguous_format}
    return [torch.empty_like(x, **contiguous) for x in _differentiable(*args[:8])]


def _differentiable(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.lengths, ctx.lower_bound = inputs[9:]


def _gradients(ctx: Any, do_THV: Tensor, d_after_NHKV: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(*ctx.saved_tensors, ctx.lengths, ctx.lower_bound, do_THV, d_after_NHKV)
    return *grads, *(None,) * (11 - len(grads))


_forward.register_autograd(_gradients, setup_context=_save)
