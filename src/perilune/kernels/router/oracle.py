"""One token's experts, found by sorting. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.router.reference import Routes


def route(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    bias = bias_E.tolist()
    experts, weights, scores = [], [], []
    for logits_E in logits_TE:
        s_E = [1 / (1 + torch.exp(-logit)) for logit in logits_E]
        # The index stands second: of equal scores the lower index comes first.
        ranking = sorted(
            (-(s.item() + b), e) for e, (s, b) in enumerate(zip(s_E, bias, strict=True))
        )
        chosen = [e for _, e in ranking[:num_active]]
        total = torch.stack([s_E[e] for e in chosen]).sum() + 1e-20
        shares = [s_E[e] / total if renormalize else s_E[e] for e in chosen]
        experts.append(torch.tensor(chosen))
        weights.append(torch.stack(shares) * scale)
        scores.append(torch.stack(s_E))
    return Routes(torch.stack(experts), torch.stack(weights), torch.stack(scores))
