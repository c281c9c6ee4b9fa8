"""Attention over residual sources on a GPU, with gradients.

Legend: N sources, T packed tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.attn_res import reference, triton_graph
from perilune.kernels.attn_res.triton_backward import backward
from perilune.kernels.attn_res.triton_forward import forward
from perilune.kernels.attn_res.triton_graph import rows

WIDEST = 16384
"""Elements of a row that one program still holds."""


def attn_res(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """As `reference.attn_res`; fp64, more axes and rows that no program holds run the reference."""
    unserved = sources_NTD.dim() != 3 or sources_NTD.shape[-1] > WIDEST
    if unserved or torch.float64 in (sources_NTD.dtype, query_D.dtype):
        return reference.attn_res(sources_NTD, query_D, eps)
    assert query_D.shape == sources_NTD.shape[2:], (query_D.shape, sources_NTD.shape)
    run = triton_graph.read if torch.compiler.is_compiling() else _Read.apply
    return run(sources_NTD, query_D.contiguous(), eps)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
        mixed = forward(rows(sources_NTD), query_D, eps)
        ctx.save_for_backward(sources_NTD, query_D, mixed.stats_ST)
        return mixed.h_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_TD: Tensor) -> tuple[Tensor | None, ...]:
        sources_NTD, query_D, stats_ST = ctx.saved_tensors
        grads = backward(rows(sources_NTD), query_D, stats_ST, rows(dh_TD))
        return grads.sources_NTD, grads.query_D.to(query_D.dtype), None
