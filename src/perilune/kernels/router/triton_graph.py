"""Choice and permutation inside of a compiled graph: ops that a compiler does not look into.

Legend: T tokens, E experts, R experts a token, B bins of a histogram.

An op that writes to its arguments has no gradient: counting and choosing are one op, and another
one takes the weights on their way to the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perilune.kernels.common.row_major import row_major
from perilune.kernels.router import triton_permute
from perilune.kernels.router.permutation import Permutation
from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally
from perilune.kernels.router.triton_backward import backward
from perilune.kernels.router.triton_forward import forward


def route(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_active: int,
    renormalize: bool,
    scale: float,
    tally: Tally | None,
) -> Routes:
    """As `triton.route`."""
    counters = (None, None, None) if tally is None else tally
    choice = num_active, renormalize, scale
    expert_TR, weight_TR = _choose(logits_TE.detach(), bias_E, *choice, *counters)
    return Routes(expert_TR, _weigh(logits_TE, expert_TR, weight_TR, renormalize, scale))


@torch.library.custom_op("perilune::route", mutates_args=("count_EB", "load_E"))
def _choose(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_active: int,
    renormalize: bool,
    scale: float,
    count_EB: Tensor | None,
    load_E: Tensor | None,
    is_counted_T: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tally = None
    if count_EB is not None and load_E is not None:
        tally = Tally(count_EB, load_E, is_counted_T)
    routes = forward(row_major(logits_TE), bias_E, num_active, renormalize, scale, tally)
    return routes.expert_TR, routes.weight_TR


@_choose.register_fake
def _(logits_TE: Tensor, bias_E: Tensor, num_active: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = logits_TE.shape[0], num_active
    expert_TR = logits_TE.new_empty(shape, dtype=torch.int64)
    return expert_TR, logits_TE.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("perilune::route_weights", mutates_args=())
def _weigh(
    logits_TE: Tensor, expert_TR: Tensor, weight_TR: Tensor, renormalize: bool, scale: float
) -> Tensor:
    return weight_TR.clone()


@_weigh.register_fake
def _(logits_TE: Tensor, expert_TR: Tensor, weight_TR: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight_TR)


@torch.library.custom_op("perilune::route_backward", mutates_args=())
def _backward(
    expert_TR: Tensor, logits_TE: Tensor, dweight_TR: Tensor, renormalize: bool, scale: float
) -> Tensor:
    operands = expert_TR, row_major(logits_TE), dweight_TR.contiguous()
    return backward(*operands, renormalize, scale)


@_backward.register_fake
def _(expert_TR: Tensor, logits_TE: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits_TE, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits_TE, expert_TR, _, *ctx.weighing = inputs
    ctx.save_for_backward(expert_TR, logits_TE)


def _gradients(ctx: Any, dweight_TR: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(*ctx.saved_tensors, dweight_TR, *ctx.weighing), None, None, None, None


_weigh.register_autograd(_gradients, setup_context=_save)


def permute(expert_TR: Tensor, num_experts: int) -> Permutation:
    """As `triton.permute`."""
    return Permutation(*_permute(expert_TR, num_experts))


@torch.library.custom_op("perilune::permute", mutates_args=())
def _permute(expert_TR: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    start_E, pair_P, place_TR = triton_permute.permute(expert_TR.contiguous(), num_experts)
    return start_E, pair_P, place_TR


@_permute.register_fake
def _(expert_TR: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    start_E, pair_P = (
        expert_TR.new_empty(size, dtype=torch.int32)
        for size in (num_experts + 1, expert_TR.numel())
    )
    return start_E, pair_P, expert_TR.new_empty(expert_TR.shape, dtype=torch.int32)
