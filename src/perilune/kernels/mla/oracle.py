"""Attention as its definition reads: one query at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing


def mla_prefill(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    packing: Packing,
    scale: float,
    keys: Packing | None = None,
) -> Tensor:
    outputs, own = [], k_SHN.shape[2]
    ends = (packing if keys is None else keys).cu_seqlens
    for n, start in enumerate(packing.cu_seqlens[:-1]):
        for t in range(start, packing.cu_seqlens[n + 1]):
            in_front = ends[n + 1] - packing.cu_seqlens[n + 1]
            seen = list(range(ends[n], t + in_front + 1))
            if packing.segment_BL is not None:
                row = packing.segment_BL[n]
                seen = [s for s in seen if row[s - start] == row[t - start]]
            scores_SH = torch.einsum("shk,hk->sh", k_SHN[seen], q_THK[t, :, :own])
            scores_SH = scores_SH + torch.einsum("sk,hk->sh", shared_SR[seen], q_THK[t, :, own:])
            p_SH = torch.softmax(scores_SH * scale, dim=0)
            outputs.append(torch.einsum("sh,shv->hv", p_SH, v_SHV[seen]))
    return torch.stack(outputs) if outputs else q_THK.new_empty(0, *v_SHV.shape[1:])


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
    num_queries, size = q_NQHC.shape[1], latent_PSC.shape[1]
    o_NQHC = torch.zeros_like(q_NQHC[..., :kv_lora_rank])
    for n, length in enumerate(length_N.tolist()):
        for j in range(num_queries):
            rows = []
            for s in range(length - num_queries + 1 + j):
                page = int(table_NW[n, s // size])
                if page < 0:
                    continue
                row_C = latent_PSC[page, s % size]
                if shared_PSR is not None and rate_PS is not None:
                    c_C = row_C.to(q_NQHC.dtype) * rate_PS[page, s % size]
                    row_C = torch.cat([c_C, shared_PSR[page, s % size]])
                rows.append(row_C)
            if rows:
                o_NQHC[n, j] = _mixed(q_NQHC[n, j], torch.stack(rows), kv_lora_rank, scale)
    return o_NQHC


def _mixed(q_HC: Tensor, row_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    scores_HS = torch.einsum("hc,sc->hs", q_HC, row_SC) * scale
    share_HS = torch.exp(scores_HS - scores_HS.amax(dim=1, keepdim=True))
    total_H1 = share_HS.sum(dim=1, keepdim=True)
    return torch.einsum("hs,sc->hc", share_HS / total_H1, row_SC[:, :kv_lora_rank])
