"""The read inside of a compiled graph: two ops that a compiler does not look into.

A compiler that launches the kernels itself knows no limit of registers, without which backward
would run half as many programs at a time.

Legend: N sources, T packed tokens, D model width, S 2 N + 1 statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perilune.kernels.attn_res.triton_backward import backward
from perilune.kernels.attn_res.triton_forward import forward


def read(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """As `triton.attn_res`: one node of a graph, and one of its backward graph."""
    return _forward(sources_NTD, query_D, eps)[0]


def rows(x: Tensor) -> Tensor:
    """Sources and tokens may lie anywhere, a row as one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("perilune::attn_res", mutates_args=())
def _forward(sources_NTD: Tensor, query_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return forward(rows(sources_NTD), query_D.contiguous(), eps)


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    sources_NTD, *_ = args
    n, t, d = sources_NTD.shape
    stats_ST = sources_NTD.new_empty(2 * n + 1, t, dtype=torch.float32)
    return sources_NTD.new_empty(t, d), stats_ST


@torch.library.custom_op("perilune::attn_res_backward", mutates_args=())
def _backward(
    sources_NTD: Tensor, query_D: Tensor, stats_ST: Tensor, dh_TD: Tensor
) -> tuple[Tensor, Tensor]:
    operands = rows(sources_NTD), query_D.contiguous(), stats_ST.contiguous()
    grads = backward(*operands, rows(dh_TD))
    return grads.sources_NTD, grads.query_D.to(query_D.dtype)


@_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    sources_NTD, query_D, *_ = args
    return sources_NTD.new_empty(sources_NTD.shape), query_D.new_empty(query_D.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _gradients(ctx: Any, dh_TD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, dh_TD), None


_forward.register_autograd(_gradients, setup_context=_save)
