"""One query over a sequence's latents as one loop: each block of rows is read once.

Legend: S cached tokens, H heads, C latent width, R shared key channels.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.common.cpu_jit import exp, jit
from perilune.kernels.common.few_tokens import fp32_inference
from perilune.kernels.mla import reference

BLOCK = 32
"""Rows that are scored and mixed together: they stay in the first-level cache in between."""


def mla_decode(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    """As `reference.mla_decode`."""
    served = fp32_inference(q_HC, latent_SC) and latent_SC.is_contiguous() and len(latent_SC) > 0
    if not served:
        return reference.mla_decode(q_HC, latent_SC, kv_lora_rank, scale)
    assert q_HC.shape[1] == latent_SC.shape[1] >= kv_lora_rank, (q_HC.shape, latent_SC.shape)
    o_HC = q_HC.new_empty(q_HC.shape[0], kv_lora_rank)
    _mla_decode(q_HC.contiguous().numpy(), latent_SC.numpy(), np.float32(scale), o_HC.numpy())
    return o_HC


@jit
def _mla_decode(q_HC, latent_SC, scale, o_HC):
    """Softmax with a running maximum (Milakov and Gimelshein, arXiv 1805.02867)."""
    heads, rank = o_HC.shape
    highest_H = np.full(heads, -np.inf, np.float32)
    total_H = np.zeros(heads, np.float32)
    share_S = np.empty(BLOCK, np.float32)
    o_HC[:] = 0
    for start in range(0, latent_SC.shape[0], BLOCK):
        rows_SC = latent_SC[start : start + BLOCK]
        for h in range(heads):
            highest = highest_H[h]
            for s in range(rows_SC.shape[0]):
                score = np.float32(0)
                for c in range(q_HC.shape[1]):
                    score += q_HC[h, c] * rows_SC[s, c]
                share_S[s] = score * scale
                highest = max(highest, share_S[s])
            faded = exp(highest_H[h] - highest)
            highest_H[h] = highest
            total_H[h] *= faded
            for c in range(rank):
                o_HC[h, c] *= faded
            for s in range(rows_SC.shape[0]):
                share = exp(share_S[s] - highest)
                total_H[h] += share
                for c in range(rank):
                    o_HC[h, c] += share * rows_SC[s, c]
    for h in range(heads):
        for c in range(rank):
            o_HC[h, c] /= total_H[h]
