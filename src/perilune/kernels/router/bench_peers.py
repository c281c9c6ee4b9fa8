"""The same in torch's own operators, at their best setting: none of them waits for the host.

`topk` breaks ties as it likes, which the inputs of a benchmark hardly have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.registry import Inputs


def choose(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> list[Tensor]:
    score_TE = torch.sigmoid(logits_TE)
    expert_TR = torch.topk(score_TE + bias_E, num_active, dim=-1).indices
    weight_TR = score_TE.gather(-1, expert_TR)
    if renormalize:
        weight_TR = weight_TR / (weight_TR.sum(-1, keepdim=True) + 1e-20)
    return [expert_TR, weight_TR * scale]


def group(expert_TR: Tensor, num_experts: int) -> list[Tensor]:
    expert_P = expert_TR.reshape(-1)
    sorted_P, pair_P = expert_P.sort(stable=True)
    every_P = torch.arange(expert_P.shape[0], device=expert_P.device)
    place_P = torch.empty_like(pair_P).scatter_(0, pair_P, every_P)
    ends = torch.arange(num_experts + 1, device=expert_P.device)
    start_E = torch.searchsorted(sorted_P, ends)
    return [start_E.int(), pair_P.int(), place_P.view(expert_TR.shape).int()]


def choose_in_torch(inputs: Inputs, backward: bool) -> Bound:
    assert not backward
    return Bound(lambda: choose(**inputs), _as_it_is)


def choose_compiled(inputs: Inputs, backward: bool) -> Bound:
    assert not backward
    run = _compiled(choose)
    return Bound(lambda: run(**inputs), _as_it_is)


def group_in_torch(inputs: Inputs, backward: bool) -> Bound:
    return Bound(lambda: group(**inputs), _as_it_is)


def group_compiled(inputs: Inputs, backward: bool) -> Bound:
    run = _compiled(group)
    return Bound(lambda: run(**inputs), _as_it_is)


def _as_it_is(out: list[Tensor]) -> list[Tensor]:
    return out


@cache
def _compiled(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return torch.compile(function, dynamic=False)


def _peer(name: str, function: str) -> Peer:
    return Peer(name=name, distribution="torch", module="torch", bind=f"{__name__}:{function}")


CHOOSE = (
    _peer("torch topk", "choose_in_torch"),
    _peer("torch topk, compiled", "choose_compiled"),
)
GROUP = (
    _peer("torch sort", "group_in_torch"),
    _peer("torch sort, compiled", "group_compiled"),
)
