"""The routed expert MLPs, grouped by expert.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.situ.reference import situ_glu


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """sum_r weight_r * w2_e situ_glu(w13_e x, beta, linear_beta): weights after w2, fp32 sums.

    Tokens are sorted by expert so that each expert in use runs once on its own rows. The id -1 is
    that of an expert that is elsewhere, on another GPU: it adds nothing here, whatever its weight.
    """
    t, r = expert_TR.shape
    num_experts = w13_E2IL.shape[0]
    flat_R = expert_TR.reshape(-1)
    here_R = torch.where(flat_R < 0, num_experts, flat_R)
    counts = torch.bincount(here_R, minlength=num_experts + 1).tolist()[:num_experts]
    order_R = torch.argsort(here_R, stable=True)[: sum(counts)]
    token_R = order_R // r
    parts = [x_TL[:0]]
    for expert, rows in enumerate(x_TL[token_R].split(counts)):
        if len(rows):
            w13, w2 = (w[expert].to(rows.dtype).t() for w in (w13_E2IL, w2_ELI))
            parts.append(situ_glu(rows @ w13, beta, linear_beta) @ w2)
    out_RL = torch.cat(parts)
    dtype = torch.promote_types(torch.float32, x_TL.dtype)
    scaled_RL = out_RL.to(dtype) * weight_TR.reshape(-1)[order_R, None].to(dtype)
    y_TL = torch.zeros(t, x_TL.shape[1], dtype=dtype, device=x_TL.device)
    return y_TL.index_add(0, token_R, scaled_RL).to(x_TL.dtype)
