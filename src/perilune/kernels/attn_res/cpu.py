"""Attention over residual sources in few kernels, for few tokens.

Legend: N sources, T packed tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.attn_res import reference
from perilune.kernels.norm.cpu import inverse_rms


def attn_res(sources_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """As `reference.attn_res` for one tensor [N, T, D]; below fp32 the reference runs."""
    v_NTD = sources_TD
    if v_NTD.dtype != query_D.dtype or v_NTD.dtype.itemsize < 4:
        return reference.attn_res(v_NTD, query_D, eps)
    score_NT = (v_NTD @ query_D) * inverse_rms(v_NTD, eps)[..., 0]
    p_TN = torch.softmax(score_NT, dim=0).t()
    return torch.bmm(p_TN[:, None], v_NTD.transpose(0, 1))[:, 0]
