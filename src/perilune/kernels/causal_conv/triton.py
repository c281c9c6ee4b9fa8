"""The short causal convolution on a GPU, with gradients.

Legend: T packed tokens, C channels, N sequences, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.causal_conv import reference, triton_graph
from perilune.kernels.causal_conv.reference import ConvOut
from perilune.kernels.causal_conv.triton_backward import backward
from perilune.kernels.causal_conv.triton_forward import forward
from perilune.kernels.common.packing import Packing
from perilune.kernels.common.row_major import row_major


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, packing: Packing, window_NWC: Tensor | None = None
) -> ConvOut:
    """As `reference.causal_conv`; fp64 runs the reference."""
    if x_TC.dtype == torch.float64:
        return reference.causal_conv(x_TC, weight_CW, packing, window_NWC)
    (t, c), (n, w) = x_TC.shape, (packing.num_sequences, weight_CW.shape[1])
    assert t == sum(packing.lengths), (x_TC.shape, packing.lengths)
    assert weight_CW.shape[0] == c, (x_TC.shape, weight_CW.shape)
    segment_T = None
    if packing.segment_BL is not None:
        segment_T, window_NWC = packing.segment_BL.reshape(-1), None
    if window_NWC is not None:
        assert window_NWC.shape == (n, w - 1, c), (window_NWC.shape, n, w, c)
        window_NWC = window_NWC.contiguous()
    run = triton_graph.convolve if torch.compiler.is_compiling() else _CausalConv.apply
    y_TC, after = run(
        row_major(x_TC), weight_CW.contiguous(), window_NWC, segment_T, packing.lengths
    )
    return ConvOut(y_TC, None if segment_T is not None else after)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*args[:4])
        ctx.lengths = args[4]
        ctx.set_materialize_grads(False)
        return forward(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor | None, d_after: Tensor | None) -> tuple[Any, ...]:
        x_TC, weight_CW, window, segment_T = ctx.saved_tensors
        dy_TC = torch.zeros_like(x_TC) if dy_TC is None else dy_TC
        d_after = None if d_after is None else d_after.contiguous()
        grads = backward(x_TC, weight_CW, window, segment_T, ctx.lengths, row_major(dy_TC), d_after)
        dwindow = None if window is None else grads.window_NWC.to(window.dtype)
        return grads.x_TC, grads.weight_CW.to(weight_CW.dtype), dwindow, None, None
