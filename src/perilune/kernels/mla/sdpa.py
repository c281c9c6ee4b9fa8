"""Expanded prefill by cuDNN's attention, which serves widths of 192 and 128 on Hopper.

Legend: T packed tokens, B sequences, L tokens of each, H heads, K query width = N own + R shared
key channels, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.reference import with_shared

cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
MIN_TOKENS = 4096
"""Of a sequence. cuDNN builds a plan for every new shape, which short calls would not repay."""


def is_faster(q_THK: Tensor, packing: Packing, keys: Packing | None) -> bool:
    """Sequences of one length that is not short, without documents or cached keys in front."""
    causal = packing.segment_BL is None and (keys is None or keys.lengths == packing.lengths)
    long = packing.is_dense and packing.max_len >= MIN_TOKENS
    return q_THK.is_cuda and q_THK.dtype == torch.bfloat16 and causal and long


def attend(
    q_THK: Tensor,
    k_THN: Tensor,
    shared_TR: Tensor,
    v_THV: Tensor,
    packing: Packing,
    scale: float,
) -> Tensor:
    """As `reference.mla_prefill` where `is_faster` says yes; differentiable."""
    tensors = q_THK, with_shared(k_THN, shared_TR), v_THV
    rows = [packing.to_rows(x).transpose(1, 2) for x in tensors]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    o_BHLV, *_ = cudnn_attention(*rows, None, trains, 0.0, True, scale=scale)
    return packing.from_rows(o_BHLV.transpose(1, 2))
