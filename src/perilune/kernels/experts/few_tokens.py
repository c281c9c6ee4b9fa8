"""Routed experts for a few tokens on a CPU, from fp16-held weights.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.half_linear import HalfLinear, half_linear
from perilune.kernels.experts.reference import Activation
from perilune.kernels.router.reference import Routes


class ExpertMaps(NamedTuple):
    w13: HalfLinear
    w2: HalfLinear


def half_experts(w13_E2IL: Tensor, w2_ELI: Tensor) -> list[ExpertMaps] | None:
    """The maps of every expert, or None where a weight cannot be held as fp16."""
    maps = []
    for w13, w2 in zip(w13_E2IL, w2_ELI, strict=True):
        first, second = half_linear(w13), half_linear(w2)
        if first is None or second is None:
            return None
        maps.append(ExpertMaps(first, second))
    return maps


def few_token_experts(
    x_TL: Tensor, routes: Routes, maps: list[ExpertMaps], activation: Activation
) -> Tensor:
    """As `reference.experts`. Tokens that chose the same expert go through it together."""
    r = routes.expert_TR.shape[1]
    users: dict[int, list[int]] = {}
    for pair, expert in enumerate(routes.expert_TR.flatten().tolist()):
        users.setdefault(expert, []).append(pair)
    order = [pair for pairs in users.values() for pair in pairs]
    counts = [len(pairs) for pairs in users.values()]
    index_R = None if x_TL.shape[0] == 1 else torch.tensor(order)
    if index_R is None:
        inputs = [x_TL] * r
        weight_R1 = routes.weight_TR.view(-1, 1)
    else:
        inputs = x_TL[index_R // r].split(counts)
        weight_R1 = routes.weight_TR.view(-1)[index_R, None]
    hidden = [maps[e].w13(x) for e, x in zip(users, inputs, strict=True)]
    active = activation(torch.cat(hidden)).split(counts)
    out_RL = torch.cat([maps[e].w2(a) for e, a in zip(users, active, strict=True)]) * weight_R1
    if index_R is None:
        return out_RL.sum(0, keepdim=True)
    return torch.zeros_like(x_TL).index_add_(0, index_R // r, out_RL)
