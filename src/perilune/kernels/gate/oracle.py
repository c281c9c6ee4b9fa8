"""One value at a time, as the definition reads. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(o_THV: Tensor, gate_TC: Tensor) -> Tensor:
    t, heads, width = o_THV.shape
    rows = []
    for i in range(t):
        # A head's channels stand together.
        pairs = [
            (o_THV[i, h, v], gate_TC[i, h * width + v]) for h in range(heads) for v in range(width)
        ]
        rows.append(torch.stack([o / (1 + torch.exp(-gate)) for o, gate in pairs]))
    return torch.stack(rows)
