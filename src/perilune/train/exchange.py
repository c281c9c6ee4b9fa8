"""Experts shared out among ranks that have tokens of their own.

Every rank sees the tokens of all ranks that share its experts, and gets back the sum of what all
did for its own. With R experts a token, tokens go to nearly every rank as long as there are not
many more ranks than R (16 in K3), so a rank sends little that is not used; and all shapes are known
without a look at what the router chose, which a GPU would have to wait for.

Legend: T tokens of this rank, L width of what experts take, R experts a token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.kernels.router.reference import Routes


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = list(x.contiguous().chunk(dist.get_world_size(group)))
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class GroupExchange:
    """`model.moe.Exchange` of the ranks of `group`, which have equal parts of E experts, in
    order. Every rank has as many tokens."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self._group = group
        each = num_experts // dist.get_world_size(group)
        self._first, self._stop = (each * (dist.get_rank(group) + i) for i in (0, 1))

    def gather(self, z_TL: Tensor, routes: Routes) -> tuple[Tensor, Routes]:
        expert_TR = _gathered(routes.expert_TR, self._group)
        is_here_TR = (expert_TR >= self._first) & (expert_TR < self._stop)
        own_TR = torch.where(is_here_TR, expert_TR - self._first, -1)
        weight_TR = _Gather.apply(routes.weight_TR, self._group)
        return _Gather.apply(z_TL, self._group), Routes(own_TR, weight_TR)

    def scatter(self, y_TL: Tensor) -> Tensor:
        return _Scatter.apply(y_TL, self._group)
