"""Routed experts as two grouped matrix products: static shapes, no word to the host.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width,
P padded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from perilune.kernels.experts import reference
from perilune.kernels.registry import resolve

permute, situ_glu = resolve("permute"), resolve("situ")

ALIGN = 8
"""Rows of a group are a multiple of this: 16 bytes of bf16, which the weight gradient needs."""


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As `reference.experts` for bf16 tokens, with fp32 sums; other dtypes run the reference."""
    if x_TL.dtype != torch.bfloat16:
        return reference.experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)
    t, r = expert_TR.shape
    num_experts = w13_E2IL.shape[0]
    slot_TR, ends_E = _slots(expert_TR, num_experts)
    padded = (t * r + num_experts * ALIGN) // ALIGN * ALIGN
    rows = x_TL.bfloat16()[:, None].expand(-1, r, -1).reshape(t * r, -1)
    x_PL = rows.new_zeros(padded, rows.shape[1]).index_copy(0, slot_TR.reshape(-1), rows)
    hidden_P2I = grouped_mm(x_PL, w13_E2IL.bfloat16().mT, offs=ends_E)
    out_PL = grouped_mm(situ_glu(hidden_P2I, beta, linear_beta), w2_ELI.bfloat16().mT, offs=ends_E)
    out_TRL = out_PL[slot_TR].float()
    return (out_TRL * weight_TR[..., None].float()).sum(1).to(x_TL.dtype)


def _slots(expert_TR: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The padded row of every (token, choice), and the int32 end of every expert's group."""
    order = permute(expert_TR, num_experts)
    counts_E = order.start_E.diff()
    padded_E = (counts_E + ALIGN - 1) // ALIGN * ALIGN
    ends_E = padded_E.cumsum(0)
    shift_E = ends_E - padded_E - order.start_E[:-1]
    return order.place_TR + shift_E[expert_TR], ends_E.to(torch.int32)
