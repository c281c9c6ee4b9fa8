"""The most likely tokens in an order without accidents, and the filters that keep some of them.

Legend: V vocabulary, C candidates, best first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.core.types import SamplingParams

_FIRST_LOOK = 64


def likeliest(values_V: Tensor, count: int) -> Tensor:
    """Ids [C] of the `count` highest values, highest first, the lower id first on a tie.

    Fewer where the others are -inf: what cannot be is not likely.
    """
    count = min(count, values_V.shape[0])
    # A library's top-k breaks ties as it likes, so it only gives the value to reach.
    least = torch.topk(values_V, count).values[-1]
    ids_C = ((values_V >= least) & (values_V > -torch.inf)).nonzero()[:, 0]
    order_C = torch.sort(values_V[ids_C], descending=True, stable=True).indices
    return ids_C[order_C[:count]]


def is_filtering(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def removed_tokens(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Mask [V] of the tokens that must not be drawn from softmax(scaled_V).

    `scaled_V` are logits after temperature, with the maximum moved to 0. In turn:

    1. top-k: the k most likely tokens stay.
    2. top-p (arXiv 1904.09751): of these, the shortest run of the most likely ones whose
       probabilities, normalised over them, sum to at least top_p; never fewer than one.
    3. min-p (arXiv 2407.01082): of these, the ones at least min_p times as likely as the best.

    The order of equally likely tokens is that of their ids.
    """
    weight_V = scaled_V.double().exp()
    removed_V = torch.zeros_like(scaled_V, dtype=torch.bool)
    if params.top_k > 0 or params.top_p < 1:
        removed_V.fill_(True)
        removed_V[_top_ids(scaled_V, weight_V, params)] = False
    if params.min_p > 0:
        removed_V |= weight_V < params.min_p
    return removed_V


def _top_ids(scaled_V: Tensor, weight_V: Tensor, params: SamplingParams) -> Tensor:
    if params.top_k > 0:
        ids_C = likeliest(scaled_V, params.top_k)
        return _nucleus(ids_C, weight_V, params.top_p * weight_V[ids_C].sum())
    # Sorting a whole vocabulary takes longer than a step of a small model; a nucleus is short.
    mass, count = params.top_p * weight_V.sum(), _FIRST_LOOK
    while True:
        ids_C = likeliest(scaled_V, count)
        if count >= len(scaled_V) or weight_V[ids_C].sum() >= mass:
            return _nucleus(ids_C, weight_V, mass)
        count *= 8


def _nucleus(ids_C: Tensor, weight_V: Tensor, mass: Tensor) -> Tensor:
    """The shortest run of `ids_C` that weighs at least `mass`."""
    num_short = int((weight_V[ids_C].cumsum(0) < mass).sum())
    return ids_C[: num_short + 1]
