"""Attention over residual sources (Block AttnRes; arXiv 2603.15031, Kimi K3 report Eq. 8-10).

Legend: N sources, T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(sources_TD: Sequence[Tensor] | Tensor, query_D: Tensor, eps: float) -> Tensor:
    """softmax_i(query . V_i / rms(V_i)) over the sources, mixing the raw V_i; fp32 inside.

    `sources_TD` is N tensors [T, D] or one [N, T, D]; `query_D` is the product of the pseudo-query
    and the norm weight. No 1/sqrt(D), and the values are not normalised.
    """
    stacked = sources_TD if isinstance(sources_TD, Tensor) else torch.stack(list(sources_TD))
    v_NTD = stacked.to(torch.promote_types(torch.float32, stacked.dtype))
    rms_NT = torch.rsqrt(v_NTD.square().mean(-1) + eps)
    p_NT = torch.softmax((v_NTD @ query_D.to(v_NTD.dtype)) * rms_NT, dim=0)
    return (p_NT[..., None] * v_NTD).sum(0).to(stacked.dtype)
