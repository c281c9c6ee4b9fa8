"""Attention as its definition reads: one query at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing


def mla_prefill(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, packing: Packing, scale: float
) -> Tensor:
    outputs = []
    for n, start in enumerate(packing.cu_seqlens[:-1]):
        for t in range(start, packing.cu_seqlens[n + 1]):
            seen = list(range(start, t + 1))
            if packing.segment_BL is not None:
                row = packing.segment_BL[n]
                seen = [s for s in seen if row[s - start] == row[t - start]]
            scores_SH = torch.einsum("shk,hk->sh", k_THK[seen], q_THK[t]) * scale
            p_SH = torch.softmax(scores_SH, dim=0)
            outputs.append(torch.einsum("sh,shv->hv", p_SH, v_THV[seen]))
    return torch.stack(outputs)
