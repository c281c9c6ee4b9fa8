"""The choice of experts on a GPU, with gradients.

Legend: T tokens, E experts, R experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.router import reference
from perilune.kernels.router.reference import Routes
from perilune.kernels.router.triton_backward import backward
from perilune.kernels.router.triton_forward import forward

MOST_EXPERTS = 1024
MOST_ACTIVE = 32
"""One warp holds the scores; beyond these sorting wins."""


def route(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    """As `reference.route`; fp64 and more experts than a warp holds run the reference."""
    few = logits_TE.shape[1] <= MOST_EXPERTS and num_active <= MOST_ACTIVE
    if not few or torch.float64 in (logits_TE.dtype, bias_E.dtype):
        return reference.route(logits_TE, bias_E, num_active, renormalize, scale)
    assert num_active <= logits_TE.shape[1] == bias_E.shape[0], (num_active, logits_TE.shape)
    bias_E = bias_E.detach().contiguous()
    return Routes(*_Route.apply(logits_TE, bias_E, num_active, renormalize, scale))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor,
        num_active: int,
        renormalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        routes = forward(_rows(logits_TE), bias_E, num_active, renormalize, scale)
        ctx.save_for_backward(routes.expert_TR, routes.score_TE)
        ctx.mark_non_differentiable(routes.expert_TR)
        ctx.set_materialize_grads(False)
        ctx.weighing = renormalize, scale
        ctx.dtype = logits_TE.dtype
        return tuple(routes)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, dweight_TR: Tensor | None, dscore_TE: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        expert_TR, score_TE = ctx.saved_tensors
        dweight_TR = None if dweight_TR is None else dweight_TR.contiguous()
        dscore_TE = None if dscore_TE is None else _rows(dscore_TE)
        dlogits = backward(expert_TR, score_TE, dweight_TR, dscore_TE, *ctx.weighing, ctx.dtype)
        return dlogits, None, None, None, None
