"""Queries over a sequence's latents as one loop: each block of rows is read once a query.

Legend: N sequences, Q query tokens of each, H heads, C latent width, P pages of S rows, W pages a
sequence may have.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.common.cpu_jit import exp, jit
from perilune.kernels.common.few_tokens import fp32_inference
from perilune.kernels.mla import reference

BLOCK = 32
"""Rows that are scored and mixed together: they stay in the first-level cache in between."""


def mla_decode(
    q_NQHC: Tensor,
    latent_PSC: Tensor,
    table_NW: Tensor,
    length_N: Tensor,
    kv_lora_rank: int,
    scale: float,
    shared_PSR: Tensor | None = None,
    rate_PS: Tensor | None = None,
) -> Tensor:
    """As `reference.mla_decode`."""
    served = fp32_inference(q_NQHC, latent_PSC) and shared_PSR is None
    if not (served and latent_PSC.is_contiguous()):
        inputs = (q_NQHC, latent_PSC, table_NW, length_N, kv_lora_rank, scale)
        return reference.mla_decode(*inputs, shared_PSR, rate_PS)
    assert q_NQHC.shape[3] == latent_PSC.shape[2] >= kv_lora_rank, (q_NQHC.shape, latent_PSC.shape)
    o_NQHC = q_NQHC.new_empty(*q_NQHC.shape[:3], kv_lora_rank)
    _mla_decode(
        q_NQHC.contiguous().numpy(),
        latent_PSC.numpy(),
        table_NW.contiguous().numpy(),
        length_N.contiguous().numpy(),
        np.float32(scale),
        o_NQHC.numpy(),
    )
    return o_NQHC


@jit
def _mla_decode(q_NQHC, latent_PSC, table_NW, length_N, scale, o_NQHC):
    """Softmax with a running maximum (Milakov and Gimelshein, arXiv 1805.02867)."""
    queries, heads, rank = o_NQHC.shape[1:]
    page_size = latent_PSC.shape[1]
    highest_H = np.empty(heads, np.float32)
    total_H = np.empty(heads, np.float32)
    share_S = np.empty(BLOCK, np.float32)
    for n in range(q_NQHC.shape[0]):
        for j in range(queries):
            o_HC = o_NQHC[n, j]
            highest_H[:] = -np.inf
            total_H[:] = 0
            o_HC[:] = 0
            seen = length_N[n] - (queries - 1) + j
            for w in range(table_NW.shape[1]):
                page, count = table_NW[n, w], min(page_size, seen - w * page_size)
                if count <= 0:
                    break
                if page < 0:
                    continue
                for start in range(0, count, BLOCK):
                    rows_SC = latent_PSC[page, start : min(count, start + BLOCK)]
                    _attend(q_NQHC[n, j], rows_SC, scale, highest_H, total_H, share_S, o_HC)
            for h in range(heads):
                for c in range(rank):
                    o_HC[h, c] = o_HC[h, c] / total_H[h] if total_H[h] > 0 else np.float32(0)


@jit
def _attend(q_HC, rows_SC, scale, highest_H, total_H, share_S, o_HC):
    heads, rank = o_HC.shape
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
