"""Expert choice: sigmoid scores, a bias that only selects (Kimi K3 report, Eq. 11).

Legend: T tokens, E experts, R experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    expert_TR: Tensor
    """int64 expert indices, best biased score first; ties go to the lower index."""
    weight_TR: Tensor
    """fp32 mixing weights, from the unbiased scores."""
    score_TE: Tensor
    """fp32 sigmoid scores of every expert (balancing reads them)."""


def route(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    """Top `num_active` of sigmoid(logits) + bias; weights s / (sum s + 1e-20) * scale."""
    score_TE = torch.sigmoid(logits_TE.to(torch.promote_types(torch.float32, logits_TE.dtype)))
    biased = score_TE.detach() + bias_E
    expert_TR = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :num_active]
    weight_TR = score_TE.gather(-1, expert_TR)
    if renormalize:
        weight_TR = weight_TR / (weight_TR.sum(-1, keepdim=True) + 1e-20)
    return Routes(expert_TR, weight_TR * scale, score_TE)
