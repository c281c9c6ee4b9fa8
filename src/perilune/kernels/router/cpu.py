"""Expert choice of few tokens as one loop. Legend: T tokens, E experts, R experts a token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.common.cpu_jit import jit, sigmoid
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.router import reference
from perilune.kernels.router.reference import Routes


def route(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_active: int,
    renormalize: bool,
    scale: float,
    count_EB: Tensor | None = None,
    load_E: Tensor | None = None,
    is_counted_T: Tensor | None = None,
) -> Routes:
    """As `reference.route`, which serves many tokens and whoever counts them."""
    if count_EB is not None or not few_tokens(logits_TE, bias_E):
        tally = (count_EB, load_E, is_counted_T)
        return reference.route(logits_TE, bias_E, num_active, renormalize, scale, *tally)
    assert num_active <= logits_TE.shape[1] == bias_E.shape[0], (num_active, logits_TE.shape)
    weight_TR = logits_TE.new_empty(logits_TE.shape[0], num_active)
    expert_TR = torch.empty(weight_TR.shape, dtype=torch.int64)
    logits, bias = (x.contiguous().numpy() for x in (logits_TE, bias_E))
    _route(logits, bias, renormalize, np.float32(scale), expert_TR.numpy(), weight_TR.numpy())
    return Routes(expert_TR, weight_TR)


@jit
def _route(logits_TE, bias_E, renormalize, scale, expert_TR, weight_TR):
    experts = logits_TE.shape[1]
    score_E = np.empty(experts, np.float32)
    biased_E = np.empty(experts, np.float32)
    for t in range(logits_TE.shape[0]):
        for e in range(experts):
            score_E[e] = sigmoid(logits_TE[t, e])
            biased_E[e] = score_E[e] + bias_E[e]
        taken_E = np.zeros(experts, np.bool_)
        total = np.float32(0)
        for r in range(expert_TR.shape[1]):
            best = -1
            for e in range(experts):
                if not taken_E[e] and (best < 0 or _above(biased_E[e], biased_E[best])):
                    best = e
            taken_E[best] = True
            expert_TR[t, r] = best
            weight_TR[t, r] = score_E[best]
            total += score_E[best]
        factor = scale / (total + np.float32(1e-20)) if renormalize else scale
        for r in range(expert_TR.shape[1]):
            weight_TR[t, r] *= factor


@jit
def _above(x, y):
    """Whether x comes before y in a descending sort: NaN comes first."""
    return x > y or (x != x and y == y)
