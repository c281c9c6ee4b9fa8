"""Random weights for training and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.model.model import Transformer


@torch.no_grad()
def init_weights(model: Transformer, generator: torch.Generator) -> Transformer:
    """Training start: N(0, initializer_range) for matrices, 1 for norms, zero pseudo-queries.

    `A_log` = 0 is K3's choice for the bounded gate, log U(1, 16) Kimi Linear's; `dt_bias` is the
    inverse softplus of a log-uniform draw from (1e-3, 1e-1). Zero pseudo-queries (a uniform mix)
    follow arXiv 2603.15031; K3's own choice is not published.
    """
    std = model.config.initializer_range
    bounded = model.config.kda.gate_lower_bound is not None
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.zero_() if bounded else p.uniform_(1, 16, generator=generator).log_()
        elif name.endswith("dt_bias"):
            p.copy_(_inverse_softplus_draw(p, generator))
        elif name.endswith("res_proj.weight"):
            p.zero_()
        elif "norm" in name:
            p.fill_(1.0)
        elif name.endswith("conv1d.weight"):
            p.uniform_(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5, generator=generator)
        else:
            p.normal_(0.0, std, generator=generator)
    return model


def _inverse_softplus_draw(p: Tensor, generator: torch.Generator) -> Tensor:
    low, high = math.log(1e-3), math.log(1e-1)
    dt = torch.empty_like(p).uniform_(low, high, generator=generator).exp().clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


@torch.no_grad()
def random_weights(
    model: Transformer, generator: torch.Generator, gain: float = 0.8
) -> Transformer:
    """Test weights that exercise every path: no term is negligible, no gate saturates."""
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.empty_like(p).normal_(generator=generator)
        if name.endswith("A_log"):
            p.uniform_(-0.5, 1.0, generator=generator)
        elif name.endswith(("dt_bias", "correction_bias", "res_proj.weight", "conv1d.weight")):
            p.copy_(0.3 * noise)
        elif "norm" in name:
            p.copy_(1 + 0.2 * noise)
        elif name.endswith("embed_tokens.weight"):
            p.copy_(noise)
        else:
            p.copy_(gain * noise / p.shape[-1] ** 0.5)
    return model
