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
        self.counts_EB: Tensor
        self.loads_E: Tensor
        empty = torch.zeros(num_experts, BINS, dtype=torch.int64)
        self.register_buffer("counts_EB", empty, persistent=False)
        self.register_buffer("loads_E", empty[:, 0].clone(), persistent=False)

    @torch.no_grad()
    def forward(self, routes: Routes, bias_E: Tensor) -> None:
        """Counts the routes of one forward pass."""
        if not self.training:
            return
        score_TE = routes.score_TE.detach()
        alpha_T = (score_TE + bias_E).topk(self.num_active + 1, dim=-1).values[:, -1]
        low, width = _grid(bias_E)
        bin_TE = ((alpha_T[:, None] - score_TE - low) / width).long().clamp(0, BINS - 1)
        bin_TE = bin_TE + torch.arange(self.num_experts, device=bin_TE.device) * BINS
        flat = bin_TE.reshape(-1)
        self.counts_EB.view(-1).scatter_add_(0, flat, torch.ones_like(flat))
        chosen = routes.expert_TR.reshape(-1)
        self.loads_E.scatter_add_(0, chosen, torch.ones_like(chosen))

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
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / BINS


def quantile_bias(counts_EB: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """Interpolated R/E-quantile of each expert's histogram, mean-centred."""
    low, width = _grid(bias_E.double())
    cumulative_EB = counts_EB.cumsum(1).double()
    target = cumulative_EB[:, -1:] * num_active / counts_EB.shape[0]
    bin_E1 = torch.searchsorted(cumulative_EB, target.ceil()).clamp(max=counts_EB.shape[1] - 1)
    inside = counts_EB.gather(1, bin_E1).double()
    before = cumulative_EB.gather(1, bin_E1) - inside
    fraction = ((target - before) / inside.clamp(min=1)).clamp(0, 1)
    bias = (low + (bin_E1 + fraction) * width)[:, 0]
    return (bias - bias.mean()).to(bias_E.dtype)
