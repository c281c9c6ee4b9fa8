"""How evenly experts were chosen.

Legend: T tokens, E experts, R experts a token, L layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LoadStats(NamedTuple):
    """Of one step and all its layers; scalars that stay on the device until somebody reads them."""

    max_violation: Tensor
    """MaxVio of the worst layer: its largest load over its mean load, minus one."""
    load_entropy: Tensor
    """Of the worst layer, over ln E: 1 is even, 0 is one expert for all."""
    dropped: Tensor
    """Choices that no expert was given: 0, for experts have no capacity that could be exceeded."""


def loads(expert_TR: Tensor, num_experts: int, is_counted_T: Tensor | None) -> Tensor:
    """int32 [E]: how often each expert was chosen for the tokens that count (None: all)."""
    if is_counted_T is None:
        is_counted_TR = torch.ones_like(expert_TR, dtype=torch.int32)
    else:
        is_counted_TR = is_counted_T[:, None].expand_as(expert_TR).to(torch.int32)
    load_E = is_counted_TR.new_zeros(num_experts)
    return load_E.scatter_add_(0, expert_TR.flatten(), is_counted_TR.flatten())


def load_stats(load_LE: Tensor, num_choices: Tensor) -> LoadStats:
    """Of the loads of layers, each of which had `num_choices` (tokens x R) to make.

    Layers that counted nothing are even.
    """
    load = load_LE.double()
    share_LE = load / load.sum(-1, keepdim=True).clamp(min=1)
    num_experts = load.shape[-1]
    violation_L = (share_LE.amax(-1) * num_experts - 1).clamp(min=0)
    entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(num_experts)
    return LoadStats(
        max_violation=violation_L.max(),
        load_entropy=entropy_L.where(load.sum(-1) > 0, 1.0).min(),
        dropped=(num_choices - load_LE.sum(-1)).sum(),
    )
