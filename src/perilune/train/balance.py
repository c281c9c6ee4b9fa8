"""Quantile Balancing: the router bias that gives every expert its share (K3 report, App. C-D).

Legend: T tokens, E experts, R experts a token, B histogram bins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.kernels.router.reference import Routes

BINS = 1000


class QuantileBalancer(nn.Module):
    """Histograms of the required biases r = alpha - s of one layer, over a global step.

    alpha is a token's (R+1)-th biased score and s a raw score; every r lies in
    [min b - 1, max b + 1]. The bias becomes the R/E-quantile of each expert's r, mean-centred, and
    is used from the next step on.
    """

    def __init__(self, num_experts: int, num_active: int) -> None:
        super().__init__()
        self.num_experts, self.num_active = num_experts, num_active
        self.is_counted_T: Tensor | None = None
        """False for padding, set before each forward pass; None counts every token."""
        self.counts_EB: Tensor
        self.loads_E: Tensor
        empty = torch.zeros(num_experts, BINS, dtype=torch.int64)
        self.register_buffer("counts_EB", empty, persistent=False)
        self.register_buffer("loads_E", empty[:, 0].clone(), persistent=False)

    @torch.no_grad()
    def forward(self, routes: Routes, bias_E: Tensor) -> None:
        """Counts the routes of one forward pass, in training only."""
        if not self.training:
            return
        score_TE = routes.score_TE.detach()
        alpha_T = (score_TE + bias_E).topk(self.num_active + 1, dim=-1).values[:, -1]
        low, width = _grid(bias_E)
        bin_TE = ((alpha_T[:, None] - score_TE - low) / width).long().clamp(0, BINS - 1)
        bin_TE = bin_TE + torch.arange(self.num_experts, device=bin_TE.device) * BINS
        self._add(self.counts_EB.view(-1), bin_TE)
        self._add(self.loads_E, routes.expert_TR)

    def _add(self, counts: Tensor, index_TN: Tensor) -> None:
        if self.is_counted_T is None:
            one_TN = torch.ones_like(index_TN)
        else:
            one_TN = self.is_counted_T[:, None].to(index_TN.dtype).expand_as(index_TN)
        counts.scatter_add_(0, index_TN.reshape(-1), one_TN.reshape(-1))

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


def _grid(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """The lower end of the histograms and the width of a bin."""
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / BINS


def quantile_bias(counts_EB: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """R/E-quantile of each expert's histogram on the grid of `bias_E`, mean-centred."""
    low, width = _grid(bias_E.double())
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
