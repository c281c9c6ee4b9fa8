"""Quantile Balancing from its definition, token by token, without a histogram. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_quantile(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """The ceil(T R/E)-th smallest r = alpha - s of each expert, in fp64."""
    num_tokens, num_experts = score_TE.shape
    rank = -(-num_tokens * num_active // num_experts)
    columns: list[list[float]] = [[] for _ in range(num_experts)]
    bias = bias_E.double().tolist()
    for scores in score_TE.double().tolist():
        best = sorted((s + b for s, b in zip(scores, bias, strict=True)), reverse=True)
        for column, score in zip(columns, scores, strict=True):
            column.append(best[num_active] - score)
    return torch.tensor([sorted(column)[rank - 1] for column in columns], dtype=torch.float64)


def exact_bias(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """The next bias: the quantiles, mean-centred."""
    quantile_E = exact_quantile(score_TE, bias_E, num_active)
    return quantile_E - quantile_E.mean()
