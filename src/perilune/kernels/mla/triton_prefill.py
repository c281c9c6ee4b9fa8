"""Expanded prefill on a GPU, with gradients.

Legend: T packed queries, S keys, H heads, K query width = N own + R shared key channels, V value
width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla import reference, sdpa, triton_prefill_graph
from perilune.kernels.mla.triton_prefill_graph import backward_of, forward_of

MAX_OWN, MAX_SHARED, MAX_VALUE = 128, 64, 128
"""Channels whose tiles fit a multiprocessor."""


def mla_prefill(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    packing: Packing,
    scale: float,
    keys: Packing | None = None,
) -> Tensor:
    """As `reference.mla_prefill`; whatever `serves` says no to runs the reference."""
    if not serves(q_THK, k_SHN, shared_SR, v_SHV, scale):
        return reference.mla_prefill(q_THK, k_SHN, shared_SR, v_SHV, packing, scale, keys)
    reference.check_keys(packing, keys)
    _check(q_THK, k_SHN, shared_SR, v_SHV, packing, keys)
    tensors = (q_THK, k_SHN, shared_SR, v_SHV)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if sdpa.is_faster(q_THK, v_SHV, packing, keys, trains):
        return sdpa.attend(q_THK, k_SHN, shared_SR, v_SHV, packing, scale)
    lengths = list(packing.lengths), list((packing if keys is None else keys).lengths)
    run = triton_prefill_graph.attend if torch.compiler.is_compiling() else _Attend.apply
    return run(q_THK, k_SHN, shared_SR, v_SHV, packing.segment_BL, *lengths, scale)


def serves(q_THK: Tensor, k_SHN: Tensor, shared_SR: Tensor, v_SHV: Tensor, scale: float) -> bool:
    """One dtype, bf16 or fp32, and channels that fit: K3's are 128 + 64 and 128."""
    tensors = (q_THK, k_SHN, shared_SR, v_SHV)
    same = len({x.dtype for x in tensors}) == 1 and q_THK.dtype in (torch.bfloat16, torch.float32)
    widths = k_SHN.shape[-1], shared_SR.shape[-1], v_SHV.shape[-1]
    fit = zip(widths, (MAX_OWN, MAX_SHARED, MAX_VALUE), strict=True)
    return same and scale > 0 and all(0 < width <= most for width, most in fit)


def _check(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    packing: Packing,
    keys: Packing | None,
) -> None:
    t, s = sum(packing.lengths), sum((packing if keys is None else keys).lengths)
    (_, h, n), r = k_SHN.shape, shared_SR.shape[1]
    shapes = q_THK.shape, k_SHN.shape, shared_SR.shape, v_SHV.shape
    assert shapes[:3] == ((t, h, n + r), (s, h, n), (s, r)), shapes
    assert shapes[3][:2] == (s, h), shapes


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, segment_BL, lengths, key_lengths, scale = inputs
        ctx.layout = lengths, key_lengths, scale
        out = forward_of(*tensors, segment_BL, *ctx.layout)
        ctx.save_for_backward(*tensors, segment_BL, *out)
        return out.o_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_of(*ctx.saved_tensors, do_THV, *ctx.layout), *(None,) * 4
