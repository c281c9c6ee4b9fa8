"""Absorbed decoding on a GPU, without gradients.

Legend: S cached tokens, H heads, C latent width, R shared key channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.mla import reference
from perilune.kernels.mla.triton_decode import attend

MAX_RANK, MAX_SHARED = 512, 64
"""Channels of a row whose tile fits beside the queries."""


def mla_decode(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    """As `reference.mla_decode`; whatever `serves` says no to runs the reference."""
    if not serves(q_HC, latent_SC, kv_lora_rank):
        return reference.mla_decode(q_HC, latent_SC, kv_lora_rank, scale)
    return attend(_row_major(q_HC), _row_major(latent_SC), kv_lora_rank, scale)


def serves(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int) -> bool:
    """Inference in one dtype, bf16 or fp32, with rows that fit: K3's have 512 and 64 channels."""
    graded = torch.is_grad_enabled() and (q_HC.requires_grad or latent_SC.requires_grad)
    same = q_HC.dtype == latent_SC.dtype and q_HC.dtype in (torch.bfloat16, torch.float32)
    width = q_HC.shape[1]
    rows_fit = 0 < kv_lora_rank <= MAX_RANK and 0 < width - kv_lora_rank <= MAX_SHARED
    some = q_HC.shape[0] > 0 and latent_SC.shape[0] > 0 and latent_SC.shape[1] == width
    return not graded and same and rows_fit and some


def _row_major(x_SC: Tensor) -> Tensor:
    """Only rows may be strided: a cache's slice goes in as it is."""
    return x_SC if x_SC.stride(1) == 1 else x_SC.contiguous()
