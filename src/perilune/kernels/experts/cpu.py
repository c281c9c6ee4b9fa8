"""Routed experts for few tokens as one loop over weights that are held as bf16.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.common.cpu_jit import bf16_to_fp32, jit
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.experts import reference
from perilune.kernels.situ.cpu import cap, glu


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As `reference.experts`; the loop serves few fp32 tokens and bf16 weights, exactly widened."""
    narrow = w13_E2IL.dtype == w2_ELI.dtype == torch.bfloat16
    if not narrow or not few_tokens(x_TL, weight_TR):
        return reference.experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)
    count, width, inner = w2_ELI.shape
    assert w13_E2IL.shape == (count, 2 * inner, width), (w13_E2IL.shape, w2_ELI.shape)
    assert x_TL.shape[1] == width, (x_TL.shape, w2_ELI.shape)
    assert expert_TR.shape == weight_TR.shape, (expert_TR.shape, weight_TR.shape)
    y_TL = x_TL.new_empty(x_TL.shape)
    _experts(
        x_TL.contiguous().numpy(),
        expert_TR.contiguous().numpy(),
        weight_TR.contiguous().numpy(),
        w13_E2IL.contiguous().view(torch.uint16).numpy(),
        w2_ELI.contiguous().view(torch.uint16).numpy(),
        cap(beta),
        cap(linear_beta),
        y_TL.numpy(),
    )
    return y_TL


@jit
def _experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta, y_TL):
    width, inner = w2_ELI.shape[1:]
    hidden_2I = np.empty(2 * inner, np.float32)
    for t in range(x_TL.shape[0]):
        y_TL[t] = 0
        for r in range(expert_TR.shape[1]):
            e = expert_TR[t, r]
            if e < 0:
                continue
            for j in range(2 * inner):
                total = np.float32(0)
                for i in range(width):
                    total += x_TL[t, i] * bf16_to_fp32(w13_E2IL[e, j, i])
                hidden_2I[j] = total
            for j in range(inner):
                hidden_2I[j] = glu(hidden_2I[j], hidden_2I[inner + j], beta, linear_beta)
            for i in range(width):
                total = np.float32(0)
                for j in range(inner):
                    total += hidden_2I[j] * bf16_to_fp32(w2_ELI[e, i, j])
                y_TL[t, i] += weight_TR[t, r] * total
