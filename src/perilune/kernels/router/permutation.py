"""Pairs of a token and an expert, grouped by expert.

Legend: T tokens, R experts a token, E experts, P = T R pairs; pair p is choice p % R of token
p // R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    start_E: Tensor
    """int32 [E+1]: expert e has the places from start_E[e] up to start_E[e+1]."""
    pair_P: Tensor
    """int32 [P]: the pair at each place; an expert's pairs rise, so that its tokens do."""
    place_TR: Tensor
    """int32 [T, R], the inverse: the place of each pair."""


def permute(expert_TR: Tensor, num_experts: int) -> Permutation:
    """Where each pair stands when all are grouped by expert.

    The experts of a token are distinct, but for -1: nobody's pair. Its place is -1, and so are the
    pairs from start_E[E] on, where places are left over.
    """
    expert_P = expert_TR.reshape(-1)
    nobody_P = expert_P < 0
    sorted_P, pair_P = torch.where(nobody_P, num_experts, expert_P).sort(stable=True)
    ends = torch.arange(num_experts + 1, device=expert_TR.device)
    start_E = torch.searchsorted(sorted_P, ends)
    every_P = torch.arange(expert_P.shape[0], device=expert_TR.device)
    place_P = torch.empty_like(pair_P).scatter(0, pair_P, every_P)
    return Permutation(
        start_E.int(),
        torch.where(every_P < start_E[-1], pair_P, -1).int(),
        torch.where(nobody_P, -1, place_P).view(expert_TR.shape).int(),
    )
