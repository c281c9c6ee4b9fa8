"""The choice of experts on a GPU, with gradients, and the permutation of pairs.

Legend: T tokens, E experts, R experts a token, B bins of a histogram.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.common.row_major import row_major
from perilune.kernels.router import permutation, reference, triton_graph, triton_permute
from perilune.kernels.router.permutation import Permutation
from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally
from perilune.kernels.router.triton_backward import backward
from perilune.kernels.router.triton_forward import forward

MOST_EXPERTS = 1024
MOST_ACTIVE = 32
"""One warp holds the scores; beyond these sorting wins."""


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
    """As `reference.route`; fp64 and more experts than a warp holds run the reference."""
    choice = (num_active, renormalize, scale)
    few = logits_TE.shape[1] <= MOST_EXPERTS and num_active <= MOST_ACTIVE
    if not few or torch.float64 in (logits_TE.dtype, bias_E.dtype):
        return reference.route(logits_TE, bias_E, *choice, count_EB, load_E, is_counted_T)
    assert num_active <= logits_TE.shape[1] == bias_E.shape[0], (num_active, logits_TE.shape)
    bias_E = bias_E.detach().contiguous()
    tally = None
    if count_EB is not None and load_E is not None:
        assert num_active < logits_TE.shape[1], (num_active, logits_TE.shape)
        experts, tokens = logits_TE.shape[1:], logits_TE.shape[:1]
        assert count_EB.shape[:1] == load_E.shape == experts, (count_EB.shape, load_E.shape)
        assert is_counted_T is None or is_counted_T.shape == tokens, is_counted_T.shape
        assert count_EB.dtype == load_E.dtype == torch.int32, (count_EB.dtype, load_E.dtype)
        counted = None if is_counted_T is None else is_counted_T.contiguous()
        tally = Tally(count_EB, load_E, counted)
    if torch.compiler.is_compiling():
        return triton_graph.route(logits_TE, bias_E, *choice, tally)
    return Routes(*_Route.apply(logits_TE, bias_E, *choice, tally))


def permute(expert_TR: Tensor, num_experts: int) -> Permutation:
    """As `permutation.permute`, which also serves more experts than a program holds words of."""
    if num_experts > MOST_EXPERTS:
        return permutation.permute(expert_TR, num_experts)
    if torch.compiler.is_compiling():
        return triton_graph.permute(expert_TR, num_experts)
    return triton_permute.permute(expert_TR.contiguous(), num_experts)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor,
        num_active: int,
        renormalize: bool,
        scale: float,
        tally: Tally | None,
    ) -> tuple[Tensor, Tensor]:
        rows_TE = row_major(logits_TE)
        routes = forward(rows_TE, bias_E, num_active, renormalize, scale, tally)
        ctx.save_for_backward(routes.expert_TR, rows_TE)
        ctx.mark_non_differentiable(routes.expert_TR)
        ctx.set_materialize_grads(False)
        ctx.weighing = renormalize, scale
        return tuple(routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dweight_TR: Tensor) -> tuple[Tensor | None, ...]:
        dlogits_TE = backward(*ctx.saved_tensors, dweight_TR.contiguous(), *ctx.weighing)
        return dlogits_TE, None, None, None, None, None
