"""Attention over residual sources (Block AttnRes; arXiv 2603.15031, Kimi K3 report Eq. 8-10).

Legend: N sources, T packed tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """softmax_i(query . V_i / rms(V_i)) over the sources, mixing the raw V_i; fp32 inside.

    `query_D` is the product of the pseudo-query and the norm weight. No 1/sqrt(D), and the values
    are not normalised.
    """
    v_NTD = sources_NTD.to(torch.promote_types(torch.float32, sources_NTD.dtype))
    rms_NT = torch.rsqrt(v_NTD.square().mean(-1) + eps)
    p_NT = torch.softmax((v_NTD @ query_D.to(v_NTD.dtype)) * rms_NT, dim=0)
    return (p_NT[..., None] * v_NTD).sum(0).to(sources_NTD.dtype)
