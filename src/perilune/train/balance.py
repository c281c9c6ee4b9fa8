"""Quantile Balancing: the router bias that gives every expert its share (K3 report, App. C-D).

Legend: E experts, R experts a token, B histogram bins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.kernels.router.tally import Tally, grid

BINS = 1000


class QuantileBalancer(nn.Module):
    """Histograms of the required biases of one layer, over a global step (`router.tally`).

    The router adds to them while it chooses. The bias becomes the R/E-quantile of each expert's
    required biases, mean-centred, and is used from the next step on.
    """

    def __init__(self, num_experts: int, num_active: int) -> None:
        super().__init__()
        self.num_experts, self.num_active = num_experts, num_active
        self.is_counted_T: Tensor | None = None
        """False for padding, set before each forward pass; None counts every token."""
        self.counts_EB: Tensor
        self.loads_E: Tensor
        empty = torch.zeros(num_experts, BINS, dtype=torch.int32)
        self.register_buffer("counts_EB", empty, persistent=False)
        self.register_buffer("loads_E", empty[:, 0].clone(), persistent=False)

    def forward(self) -> Tally | None:
        """Where the router is to count: in training only."""
        return Tally(self.counts_EB, self.loads_E, self.is_counted_T) if self.training else None

    @torch.no_grad()
    def update(self, bias_E: Tensor) -> Tensor:
        """Writes the next bias into `bias_E`, clears the counts and returns MaxVio of the step.

        MaxVio is the largest load over the mean load, minus one.
        """
        loads = self.loads_E.double()
        max_violation = loads.max() / loads.mean() - 1
        bias_E.copy_(quantile_bias(self.counts_EB, bias_E, self.num_active))
        self.counts_EB.zero_()
        self.loads_E.zero_()
        return max_violation


def quantile_bias(counts_EB: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """R/E-quantile of each expert's histogram on the grid of `bias_E`, mean-centred."""
    low, width = grid(bias_E.double(), counts_EB.shape[1])
    bias = low + histogram_quantile(counts_EB, num_active) * width
    return (bias - bias.mean()).to(bias_E.dtype)


def histogram_quantile(counts_EB: Tensor, num_active: int) -> Tensor:
    """Where R/E of each row's counts is reached, in bins [E], interpolated inside the bin."""
    num_experts, num_bins = counts_EB.shape
    cumulative_EB = counts_EB.cumsum(1).double()
    target_E1 = cumulative_EB[:, -1:] * num_active / num_experts
    bin_E1 = torch.searchsorted(cumulative_EB, target_E1.ceil()).clamp(max=num_bins - 1)
    inside_E1 = counts_EB.gather(1, bin_E1).double()
    before_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    fraction_E1 = ((target_E1 - before_E1) / inside_E1.clamp(min=1)).clamp(0, 1)
    return (bin_E1 + fraction_E1)[:, 0]
