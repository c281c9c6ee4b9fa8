"""The gate of attention's output (Kimi K3 report: gated MLA). Legend: T tokens, H heads, V value
width, C = HV channels."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(o_THV: Tensor, gate_TC: Tensor) -> Tensor:
    """o sigmoid(gate), in the gate's dtype; fp32 inside."""
    wide = torch.promote_types(torch.float32, gate_TC.dtype)
    o_TC = o_THV.reshape(gate_TC.shape).to(wide)
    return (o_TC * torch.sigmoid(gate_TC.to(wide))).to(gate_TC.dtype)
