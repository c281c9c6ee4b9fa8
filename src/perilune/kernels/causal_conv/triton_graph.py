"""The convolution inside of a compiled graph: two ops that a compiler does not look into.

A kernel finds its run in a table on the device, kept between calls. A compiler that reads the
kernels takes the table for written to, and then cannot part forward from backward.

Legend: T packed tokens, C channels, N sequences, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.causal_conv.triton_backward import backward
from perilune.kernels.causal_conv.triton_forward import forward
from perilune.kernels.common.row_major import row_major


@torch.library.custom_op("perilune::causal_conv", mutates_args=())
def convolve(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_NWC: Tensor | None,
    segment_T: Tensor | None,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As `triton_forward.forward`, with gradients."""
    return forward(row_major(x_TC), weight_CW, window_NWC, segment_T, tuple(lengths))


@convolve.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x_TC, weight_CW, _, segment_T, lengths = args
    num_windows = len(lengths) if segment_T is None else 0
    shape = (num_windows, weight_CW.shape[1] - 1, x_TC.shape[1])
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    return y_TC, x_TC.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("perilune::causal_conv_backward", mutates_args=())
def _backward(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_NWC: Tensor | None,
    segment_T: Tensor | None,
    lengths: Sequence[int],
    dy_TC: Tensor,
    d_after_NWC: Tensor,
) -> list[Tensor]:
    """Gradients of x and the weight, and of the window where there is one."""
    d_after = None if segment_T is not None else d_after_NWC.contiguous()
    rows = (row_major(x_TC), weight_CW, window_NWC, segment_T, tuple(lengths))
    grads = backward(*rows, row_major(dy_TC), d_after)
    inputs = _differentiable(x_TC, weight_CW, window_NWC)
    # The weights' gradient is a view of its sum, laid out the other way.
    return [g.to(x.dtype).contiguous() for g, x in zip(grads, inputs, strict=False)]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    contiguous = {"memory_format": torch.contiguous_format}
    return [torch.empty_like(x, **contiguous) for x in _differentiable(*args[:3])]


def _differentiable(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.lengths = inputs[4]


def _gradients(ctx: Any, dy_TC: Tensor, d_after_NWC: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(*ctx.saved_tensors, ctx.lengths, dy_TC, d_after_NWC)
    return *grads, *(None,) * (5 - len(grads))


convolve.register_autograd(_gradients, setup_context=_save)
