"""One token's experts, found by sorting, and its pairs by looking. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.router.permutation import Permutation
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
    bias = bias_E.tolist()
    experts, weights = [], []
    for t, logits_E in enumerate(logits_TE):
        s_E = [1 / (1 + torch.exp(-logit)) for logit in logits_E]
        # The index stands second: of equal scores the lower index comes first.
        ranking = sorted(
            (-(s.item() + b), e) for e, (s, b) in enumerate(zip(s_E, bias, strict=True))
        )
        chosen = [e for _, e in ranking[:num_active]]
        total = torch.stack([s_E[e] for e in chosen]).sum() + 1e-20
        shares = [s_E[e] / total if renormalize else s_E[e] for e in chosen]
        experts.append(torch.tensor(chosen))
        weights.append(torch.stack(shares) * scale)
        is_counted = is_counted_T is None or bool(is_counted_T[t])
        if count_EB is not None and load_E is not None and is_counted:
            alpha = -ranking[num_active][0]
            _count(count_EB, [alpha - s.item() for s in s_E], bias)
            load_E[chosen] += 1
    return Routes(torch.stack(experts), torch.stack(weights))


def _count(count_EB: Tensor, required: list[float], bias: list[float]) -> None:
    bins = count_EB.shape[1]
    low, high = min(bias) - 1, max(bias) + 1
    for e, r in enumerate(required):
        count_EB[e, min(bins - 1, int((r - low) / (high - low) * bins))] += 1


def permute(expert_TR: Tensor, num_experts: int) -> Permutation:
    pairs_of: list[list[int]] = [[] for _ in range(num_experts)]
    nobodys = []
    for p, e in enumerate(expert_TR.flatten().tolist()):
        (pairs_of[e] if e >= 0 else nobodys).append(p)
    start, pair = [0], []
    for pairs in pairs_of:
        pair += pairs
        start.append(len(pair))
    place = dict.fromkeys(nobodys, -1) | {p: i for i, p in enumerate(pair)}
    places = [place[p] for p in range(expert_TR.numel())]
    pair += [-1] * len(nobodys)
    start_E, pair_P, place_P = (torch.tensor(x, dtype=torch.int32) for x in (start, pair, places))
    return Permutation(start_E, pair_P, place_P.view(expert_TR.shape))
