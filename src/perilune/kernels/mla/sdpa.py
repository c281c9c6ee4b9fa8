"""Expanded prefill by cuDNN's attention, which serves widths of 192 and 128 on Hopper.

Legend: T packed tokens, B sequences, L tokens of each, H heads, K query width = N own + R shared
key channels, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.common.row_major import row_major
from perilune.kernels.mla.prefill_lengths import is_long
from perilune.kernels.mla.reference import with_shared
from perilune.kernels.mla.triton_join import Join

cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
HOPPER = (9, 0)
ALIGN = 8
"""Channels of a head are a multiple of this."""


def is_faster(
    q_THK: Tensor, v_THV: Tensor, packing: Packing, keys: Packing | None, trains: bool
) -> bool:
    """Long sequences of one length, without documents or cached keys in front, on a GPU whose
    cuDNN serves keys and values of unlike widths. No gradients where torch is asked for the same
    bits every time: cuDNN's backward, as torch calls it, adds up dq in whatever order it comes."""
    if not q_THK.is_cuda or torch.cuda.get_device_capability(q_THK.device) < HOPPER:
        return False
    if trains and torch.are_deterministic_algorithms_enabled():
        return False
    aligned = q_THK.shape[-1] % ALIGN == v_THV.shape[-1] % ALIGN == 0
    return q_THK.dtype == torch.bfloat16 and aligned and is_long(packing, keys, trains)


def attend(
    q_THK: Tensor,
    k_THN: Tensor,
    shared_TR: Tensor,
    v_THV: Tensor,
    packing: Packing,
    scale: float,
) -> Tensor:
    """As `reference.mla_prefill` where `is_faster` says yes; differentiable."""
    tensors = row_major(q_THK), _whole_keys(k_THN, shared_TR), row_major(v_THV)
    rows = [packing.to_rows(x).transpose(1, 2) for x in tensors]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    o_BHLV, *_ = cudnn_attention(*rows, None, trains, 0.0, True, scale=scale)
    return packing.from_rows(o_BHLV.transpose(1, 2))


def _whole_keys(k_THN: Tensor, shared_TR: Tensor) -> Tensor:
    """A compiler may join them to whatever comes before; else one pass is faster than torch's."""
    if torch.compiler.is_compiling():
        return with_shared(k_THN, shared_TR)
    return Join.apply(row_major(k_THN), row_major(shared_TR))
