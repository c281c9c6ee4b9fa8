"""One gate and one up value at a time, as the definition reads. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    i = gate_up_2I.shape[-1] // 2
    rows = []
    for row in gate_up_2I.reshape(-1, 2 * i):
        # The gates come first, then the ups in the same order.
        pairs = [(row[c], row[i + c]) for c in range(i)]
        rows.append(torch.stack([_one(a, b, beta, linear_beta) for a, b in pairs]))
    return torch.stack(rows).view(*gate_up_2I.shape[:-1], i)


def _one(a: Tensor, b: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    gate = a if beta is None else beta * torch.tanh(a / beta)
    up = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
    return gate * torch.sigmoid(a) * up
