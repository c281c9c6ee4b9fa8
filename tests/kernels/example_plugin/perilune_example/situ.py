"""SiTU-GLU, computed here and not by the reference: a backend that hands over is red.

Legend: ... any leading shape, I intermediate width.
"""

from __future__ import annotations

from torch import Tensor


def situ_glu(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    gate, up = gate_up_2I.float().chunk(2, dim=-1)
    out = _capped(gate, beta) * gate.sigmoid() * _capped(up, linear_beta)
    return out.to(gate_up_2I.dtype)


def _capped(x: Tensor, beta: float | None) -> Tensor:
    return x if beta is None else (x / beta).tanh() * beta
