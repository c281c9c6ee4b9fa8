"""Attention over residual sources for few tokens as one loop.

Legend: N sources, T packed tokens, D model width.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perilune.kernels.attn_res import reference
from perilune.kernels.common.cpu_jit import exp, jit
from perilune.kernels.common.few_tokens import few_tokens


def attn_res(sources_NTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """As `reference.attn_res`."""
    if sources_NTD.dim() != 3 or not few_tokens(sources_NTD[0], query_D):
        return reference.attn_res(sources_NTD, query_D, eps)
    assert query_D.shape == sources_NTD.shape[2:], (query_D.shape, sources_NTD.shape)
    h_TD = sources_NTD.new_empty(sources_NTD.shape[1:])
    inputs = (x.contiguous().numpy() for x in (sources_NTD, query_D))
    _attn_res(*inputs, np.float32(eps), h_TD.numpy())
    return h_TD


@jit
def _attn_res(sources_NTD, query_D, eps, h_TD):
    n, t, width = sources_NTD.shape
    share_N = np.empty(n, np.float32)
    for token in range(t):
        for i in range(n):
            squares = dot = np.float32(0)
            for d in range(width):
                v = sources_NTD[i, token, d]
                squares += v * v
                dot += v * query_D[d]
            share_N[i] = dot / np.sqrt(squares / np.float32(width) + eps)
        highest = share_N.max()
        total = np.float32(0)
        for i in range(n):
            share_N[i] = exp(share_N[i] - highest)
            total += share_N[i]
        h_TD[token] = 0
        for i in range(n):
            share = share_N[i] / total
            for d in range(width):
                h_TD[token, d] += share * sources_NTD[i, token, d]
