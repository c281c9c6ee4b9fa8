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
    """The bins of r under these biases; of several layers, if there are dimensions in front."""
    low = bias_E.amin(-1) - 1
    return Grid(low, (bias_E.amax(-1) + 1 - low) / bins)


def add(tally: Tally, score_TE: Tensor, alpha_T: Tensor, expert_TR: Tensor, bias_E: Tensor) -> None:
    """Counts every expert of every token once."""
    bins = tally.count_EB.shape[1]
    low, width = grid(bias_E, bins)
    bin_TE = ((alpha_T[:, None] - score_TE - low) / width).long().clamp(0, bins - 1)
    tally.count_EB.scatter_add_(1, bin_TE.t(), _ones(bin_TE, tally).t())
    tally.load_E.scatter_add_(0, expert_TR.reshape(-1), _ones(expert_TR, tally).reshape(-1))


def _ones(index_TN: Tensor, tally: Tally) -> Tensor:
    if tally.is_counted_T is None:
        return torch.ones_like(index_TN, dtype=torch.int32)
    return tally.is_counted_T[:, None].to(torch.int32).expand_as(index_TN)
