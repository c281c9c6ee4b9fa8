"""One token, one source at a time, as the definition reads. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    tokens = range(sources_NTD[0].shape[0])
    return torch.stack([_mix([V_TD[t] for V_TD in sources_NTD], query_D, eps) for t in tokens])


def _mix(sources_D: list[Tensor], query_D: Tensor, eps: float) -> Tensor:
    scores = []
    for V_D in sources_D:
        mean_square = torch.dot(V_D, V_D) / len(V_D)
        scores.append(torch.dot(query_D, V_D) / torch.sqrt(mean_square + eps))
    top = max(score.item() for score in scores)
    shares = [torch.exp(score - top) for score in scores]
    total = torch.stack(shares).sum()
    mixed_D = torch.zeros_like(query_D)
    for share, V_D in zip(shares, sources_D, strict=True):
        mixed_D = mixed_D + share / total * V_D
    return mixed_D
