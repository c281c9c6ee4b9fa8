"""What balancing counts while experts are chosen (K3 report, App. C-D).

Legend: T tokens, E experts, R experts a token, B bins of a histogram.

An expert would be chosen for a token if its bias were above r = alpha - s, where alpha is the
token's (R+1)-th best biased score and s the expert's own raw one. Every r lies within
[min b - 1, max b + 1], which a histogram divides into B bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tally(NamedTuple):
    """Counters to which a choice adds."""

    count_EB: Tensor
    """int32: how often r of an expert lay in a bin."""
    load_E: Tensor
    """int32: how often an expert was chosen."""
    is_counted_T: Tensor | None = None
    """bool: False for padding. None: every token counts."""


class Grid(NamedTuple):
    low: Tensor
    """The lower end of the first bin."""
    width: Tensor
    """Of a bin."""


def grid(bias_E: Tensor, bins: int) -> Grid:
    """The bins of r under these biases."""
    low = bias_E.min() - 1
    return Grid(low, (bias_E.max() + 1 - low) / bins)


def add(tally: Tally, score_TE: Tensor, alpha_T: Tensor, expert_TR: Tensor, bias_E: Tensor) -> None:
    """Counts every expert of every token once."""
    num_experts, bins = tally.count_EB.shape
    low, width = grid(bias_E, bins)
    bin_TE = ((alpha_T[:, None] - score_TE - low) / width).long().clamp(0, bins - 1)
    first_E = torch.arange(num_experts, device=bin_TE.device) * bins
    _count(tally.count_EB.view(-1), bin_TE + first_E, tally.is_counted_T)
    _count(tally.load_E, expert_TR, tally.is_counted_T)


def _count(counters: Tensor, index_TN: Tensor, is_counted_T: Tensor | None) -> None:
    one_TN = torch.ones_like(index_TN, dtype=counters.dtype)
    if is_counted_T is not None:
        one_TN = is_counted_T[:, None].to(counters.dtype).expand_as(index_TN)
    counters.scatter_add_(0, index_TN.reshape(-1), one_TN.reshape(-1))
