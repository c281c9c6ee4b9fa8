"""Quantile Balancing: the bias at which every expert gets its share (K3 report, App. C-D).

Legend: L layers, E experts, R experts a token, B histogram bins.

An expert is chosen for a token if its bias is above r = alpha - s (`router.tally`). So under the
R/E-quantile of its r over the tokens, it would get R/E of them, were the alphas to stay as they
are; they move with the other biases, and a few steps settle them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.router.tally import grid


def quantile_bias(count_LEB: Tensor, bias_LE: Tensor, num_active: int) -> Tensor:
    """R/E-quantiles of histograms on the grids of `bias_LE`, mean-centred. Any leading dimensions.

    A layer of which nothing was counted keeps its bias.
    """
    low_L, width_L = grid(bias_LE.double(), count_LEB.shape[-1])
    quantile_LE = low_L[..., None] + histogram_quantile(count_LEB, num_active) * width_L[..., None]
    centred_LE = (quantile_LE - quantile_LE.mean(-1, keepdim=True)).to(bias_LE.dtype)
    is_counted_L = count_LEB.sum((-2, -1)) > 0
    return centred_LE.where(is_counted_L[..., None], bias_LE)


def histogram_quantile(count_LEB: Tensor, num_active: int) -> Tensor:
    """Where R/E of each row's counts is reached, in bins [L, E], interpolated inside the bin."""
    num_experts, num_bins = count_LEB.shape[-2:]
    cumulative_LEB = count_LEB.cumsum(-1, dtype=torch.int32)
    target_LE1 = cumulative_LEB[..., -1:].double() * num_active / num_experts
    reached_LE1 = target_LE1.ceil().to(torch.int32)
    bin_LE1 = (cumulative_LEB < reached_LE1).sum(-1, keepdim=True).clamp(max=num_bins - 1)
    inside_LE1 = count_LEB.gather(-1, bin_LE1)
    before_LE1 = cumulative_LEB.gather(-1, bin_LE1) - inside_LE1
    fraction_LE1 = ((target_LE1 - before_LE1) / inside_LE1.clamp(min=1)).clamp(0, 1)
    return (bin_LE1 + fraction_LE1)[..., 0]
