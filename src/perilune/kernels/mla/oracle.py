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


def mla_decode(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    heads = []
    for q_C in q_HC:
        scores = [torch.dot(q_C, row_C) * scale for row_C in latent_SC]
        top = max(score.item() for score in scores)
        shares = [torch.exp(score - top) for score in scores]
        total = torch.stack(shares).sum()
        o_C = torch.zeros_like(q_C[:kv_lora_rank])
        for share, row_C in zip(shares, latent_SC, strict=True):
            o_C = o_C + share / total * row_C[:kv_lora_rank]
        heads.append(o_C)
    return torch.stack(heads)
