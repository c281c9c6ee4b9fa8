"""Attention over residual sources (Block AttnRes; arXiv 2603.15031, Kimi K3 report Eq. 8-10).

Legend: N committed blocks, T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.norm.reference import rms_norm


class Read(NamedTuple):
    h_TD: Tensor
    """The mixture, normed where a weight is given."""
    partial_TD: Tensor | None
    """The running sum with the update in it; None without an update."""


def attn_res(
    partial_TD: Tensor,
    blocks_NTD: Tensor | Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None = None,
    weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Read:
    """softmax_i(query . V_i / rms(V_i)) over the sources, mixing the raw V_i; fp32 inside.

    Sources are the blocks, as one tensor or one by one, and the running sum, to which `update_TD`
    is added first. `query_D` is the product of the pseudo-query and the weight of the norm of the
    sources (`eps`). No 1/sqrt(D), and the values are not normalised. With `weight_D` the mixture
    goes through a norm of its own (`norm_eps`).
    """
    total_TD = partial_TD if update_TD is None else partial_TD + update_TD
    sources_NTD = torch.stack([*blocks_NTD, total_TD])
    v_NTD = sources_NTD.to(torch.promote_types(torch.float32, sources_NTD.dtype))
    rms_NT = torch.rsqrt(v_NTD.square().mean(-1) + eps)
    p_NT = torch.softmax((v_NTD @ query_D.to(v_NTD.dtype)) * rms_NT, dim=0)
    h_TD = (p_NT[..., None] * v_NTD).sum(0).to(sources_NTD.dtype)
    if weight_D is not None:
        h_TD = rms_norm(h_TD, weight_D, norm_eps)
    return Read(h_TD, None if update_TD is None else total_TD)
