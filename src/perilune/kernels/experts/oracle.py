"""One token, one expert at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.experts.reference import Activation


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    activation: Activation,
) -> Tensor:
    outputs = []
    for x_L, chosen, weights in zip(x_TL, expert_TR.tolist(), weight_TR, strict=True):
        terms = [
            weight * (w2_ELI[e] @ activation(w13_E2IL[e] @ x_L))
            for e, weight in zip(chosen, weights, strict=True)
        ]
        outputs.append(torch.stack(terms).sum(0))
    return torch.stack(outputs)
