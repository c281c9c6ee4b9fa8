"""One token, one source at a time, as the definition reads. For conformance only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(
    partial_TD: Tensor,
    blocks_NTD: Tensor | Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None = None,
    weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    rows, sums = [], []
    for t in range(partial_TD.shape[0]):
        running_D = partial_TD[t]
        if update_TD is not None:
            running_D = running_D + update_TD[t]
        h_D = _mix([*(block_TD[t] for block_TD in blocks_NTD), running_D], query_D, eps)
        if weight_D is not None:
            h_D = h_D / _rms(h_D, norm_eps) * weight_D
        rows.append(h_D)
        sums.append(running_D)
    return torch.stack(rows), None if update_TD is None else torch.stack(sums)


def _mix(sources_D: list[Tensor], query_D: Tensor, eps: float) -> Tensor:
    scores = [torch.dot(query_D, V_D) / _rms(V_D, eps) for V_D in sources_D]
    top = max(score.item() for score in scores)
    shares = [torch.exp(score - top) for score in scores]
    total = torch.stack(shares).sum()
    mixed_D = torch.zeros_like(query_D)
    for share, V_D in zip(shares, sources_D, strict=True):
        mixed_D = mixed_D + share / total * V_D
    return mixed_D


def _rms(x_D: Tensor, eps: float) -> Tensor:
    return torch.sqrt(torch.dot(x_D, x_D) / len(x_D) + eps)
