"""One token, one expert at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.situ.oracle import situ_glu


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    outputs = []
    for x_L, chosen, weights in zip(x_TL, expert_TR.tolist(), weight_TR, strict=True):
        terms = [
            weight * (w2_ELI[e] @ situ_glu(w13_E2IL[e] @ x_L, beta, linear_beta))
            for e, weight in zip(chosen, weights, strict=True)
            if e >= 0
        ]
        outputs.append(torch.stack([x_L.new_zeros(w2_ELI.shape[1]), *terms]).sum(0))
    return torch.stack(outputs)
