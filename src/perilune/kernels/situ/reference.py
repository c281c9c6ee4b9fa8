"""SiTU-GLU (Kimi K3 report, Eq. 12): SwiGLU with its branches capped by tanh.

Legend: ... any leading shape, I intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """[b1 tanh(a/b1) sigmoid(a)] * [b2 tanh(b/b2)] of gate a and up b, side by side.

    fp32 inside; the sigmoid sees the raw gate. A cap of None leaves its branch uncapped: without
    both caps this is SwiGLU, silu(a) * b (Kimi Linear).
    """
    x = gate_up_2I.to(torch.promote_types(torch.float32, gate_up_2I.dtype))
    gate, up = x.chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    capped = gate if beta is None else beta * torch.tanh(gate / beta)
    return (capped * torch.sigmoid(gate) * up).to(gate_up_2I.dtype)
