"""Attention over residual sources for few tokens as one loop.

Legend: N committed blocks, M = N + 1 sources, T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.attn_res import reference
from perilune.kernels.attn_res.reference import Read
from perilune.kernels.common.cpu_jit import exp, jit
from perilune.kernels.common.few_tokens import few_tokens

_NO_WEIGHT = np.empty(0, np.float32)


def attn_res(
    partial_TD: Tensor,
    blocks_NTD: Tensor | Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None = None,
    weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Read:
    """As `reference.attn_res`."""
    optional = [x for x in (update_TD, weight_D) if x is not None]
    if partial_TD.dim() != 2 or not few_tokens(partial_TD, *blocks_NTD, query_D, *optional):
        return reference.attn_res(
            partial_TD, blocks_NTD, query_D, eps, update_TD, weight_D, norm_eps
        )
    assert query_D.shape == partial_TD.shape[1:], (query_D.shape, partial_TD.shape)
    total_TD = partial_TD if update_TD is None else partial_TD + update_TD
    # A copy of few tokens is nothing beside the weights that a token reads.
    sources_MTD = torch.stack([*blocks_NTD, total_TD])
    h_TD = total_TD.new_empty(total_TD.shape)
    weight = _NO_WEIGHT if weight_D is None else weight_D.contiguous().numpy()
    inputs = sources_MTD.numpy(), query_D.contiguous().numpy(), weight
    _attn_res(*inputs, np.float32(eps), np.float32(norm_eps), h_TD.numpy())
    return Read(h_TD, None if update_TD is None else total_TD)


@jit
def _attn_res(sources_MTD, query_D, weight_D, eps, norm_eps, h_TD):
    m, tokens, width = sources_MTD.shape
    share_M = np.empty(m, np.float32)
    for token in range(tokens):
        for i in range(m):
            squares = dot = np.float32(0)
            for d in range(width):
                v = sources_MTD[i, token, d]
                squares += v * v
                dot += v * query_D[d]
            share_M[i] = dot / np.sqrt(squares / np.float32(width) + eps)
        highest = share_M.max()
        total = np.float32(0)
        for i in range(m):
            share_M[i] = exp(share_M[i] - highest)
            total += share_M[i]
        h_TD[token] = 0
        for i in range(m):
            share = share_M[i] / total
            for d in range(width):
                h_TD[token, d] += share * sources_MTD[i, token, d]
        if weight_D.shape[0] > 0:
            squares = np.float32(0)
            for d in range(width):
                squares += h_TD[token, d] * h_TD[token, d]
            inverse = np.float32(1) / np.sqrt(squares / np.float32(width) + norm_eps)
            for d in range(width):
                h_TD[token, d] = h_TD[token, d] * inverse * weight_D[d]
