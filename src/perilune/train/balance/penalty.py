"""The auxiliary loss, put on in the router so that nothing has to carry it through the model.

Legend: T tokens, E experts, R experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perilune.kernels.router.reference import Routes
from perilune.train.balance.loads import loads


def auxiliary_loss(logits_TE: Tensor, expert_TR: Tensor, is_counted_T: Tensor | None) -> Tensor:
    """sum over experts of f P: 1 if both are even (DeepSeek-V3, arXiv 2412.19437, Eq. 17-20, over
    the tokens given instead of a sequence's).

    f is how often an expert was chosen over E/R of the tokens, P the mean of its share of a token's
    scores; the gradient flows through P alone.
    """
    num_tokens, num_experts = logits_TE.shape
    score_TE = torch.sigmoid(logits_TE.float())
    share_TE = score_TE / score_TE.sum(-1, keepdim=True)
    if is_counted_T is None:
        mean_E, count = share_TE.mean(0), num_tokens
    else:
        count = is_counted_T.sum().clamp(min=1)
        mean_E = share_TE.mul(is_counted_T[:, None]).sum(0) / count
    load_E = loads(expert_TR, num_experts, is_counted_T)
    return (load_E * (num_experts / expert_TR.shape[1]) / count * mean_E).sum()


def penalised(routes: Routes, penalty: Tensor) -> Routes:
    """The same routes; whoever differentiates a loss of their weights also gets `penalty`'s
    gradient, as if it had been added to that loss."""
    return routes._replace(weight_TR=_Penalised.apply(routes.weight_TR, penalty))


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_TR: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(penalty))
        return weight_TR.view_as(weight_TR)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]
