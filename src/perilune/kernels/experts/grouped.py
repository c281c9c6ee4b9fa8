"""Routed experts as two grouped matrix products: static shapes, no word to the host.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width,
P padded rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import grouped_mm, pad

from perilune.kernels.experts import reference
from perilune.kernels.registry import resolve
from perilune.kernels.router import permutation

permute, situ_glu = resolve("permute"), resolve("situ")

ALIGN = 8
"""Rows of a group are a multiple of this: 16 bytes of bf16, which the weight gradient needs."""


class Groups(NamedTuple):
    slot_TR: Tensor
    """int64: the padded row of every pair, -1 of one that is elsewhere."""
    start_E: Tensor
    """int32 [E+1]: where groups would begin without padding."""
    end_E: Tensor
    """int32 [E]: of every padded group."""
    rows: int
    """As many as there can be."""


def experts(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As `reference.experts` for bf16 tokens, with fp32 sums; other dtypes run the
    reference."""
    if x_TL.dtype != torch.bfloat16:
        return reference.experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)
    t, r = expert_TR.shape
    groups = groups_of(expert_TR, w13_E2IL.shape[0])
    # Pairs that are elsewhere go to one row more, and come from one of zeros.
    slot_TR, ends_E = groups.slot_TR % (groups.rows + 1), groups.end_E
    rows = x_TL.bfloat16()[:, None].expand(-1, r, -1).reshape(t * r, -1)
    x_PL = rows.new_zeros(groups.rows + 1, rows.shape[1]).index_copy(0, slot_TR.reshape(-1), rows)
    x_PL = x_PL[:-1]
    hidden_P2I = grouped_mm(x_PL, w13_E2IL.bfloat16().mT, offs=ends_E)
    out_PL = grouped_mm(situ_glu(hidden_P2I, beta, linear_beta), w2_ELI.bfloat16().mT, offs=ends_E)
    out_TRL = pad(out_PL, (0, 0, 0, 1))[slot_TR].float()
    return (out_TRL * weight_TR[..., None].float()).sum(1).to(x_TL.dtype)


def groups_of(expert_TR: Tensor, num_experts: int) -> Groups:
    """Where every pair of a token and an expert stands among the padded groups."""
    # A compiled graph takes what it can see into.
    group = permutation.permute if is_compiling() else permute
    order = group(expert_TR, num_experts)
    counts_E = order.start_E.diff()
    padded_E = (counts_E + ALIGN - 1) // ALIGN * ALIGN
    ends_E = padded_E.cumsum(0)
    # One more, for the place and the expert -1.
    shift_E = pad(ends_E - padded_E - order.start_E[:-1], (0, 1))
    rows = (expert_TR.numel() + num_experts * ALIGN) // ALIGN * ALIGN
    slot_TR = order.place_TR + shift_E[expert_TR]
    return Groups(slot_TR, order.start_E, ends_E.to(torch.int32), rows)
