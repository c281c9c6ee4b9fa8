"""What balancing does in one layer's router.

Legend: T tokens, E experts, R experts a token, B bins of a histogram.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally
from perilune.train.balance.loads import loads
from perilune.train.balance.penalty import auxiliary_loss, penalised


class LayerBalancer(nn.Module):
    """Counts what the router chooses, while it is told to, and penalises uneven loads."""

    def __init__(self, num_experts: int, bins: int, penalty: float, device: torch.device) -> None:
        """`bins` of a histogram of required biases, or 0 for loads alone; `penalty` is the weight
        of the auxiliary loss."""
        super().__init__()
        self.penalty = penalty
        # Not buffers, which a checkpoint or a cast would take for the model's.
        empty = torch.zeros(num_experts, bins, dtype=torch.int32, device=device)
        self.count_EB = empty if bins else None
        self.load_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.is_counting = False
        self.is_counted_T: Tensor | None = None
        """False for padding; None: every token counts."""
        self.share: float | Tensor = 1.0
        """Of this micro-batch in the step's loss."""

    def forward(
        self, logits_TE: Tensor, choose: Callable[[Tensor, Tally | None], Routes]
    ) -> Routes:
        """The routes of `choose`."""
        routes = self._counted(logits_TE, choose)
        # Whether it counts or not: a recomputation has to build the graph that it replaces.
        if self.penalty and self.training and torch.is_grad_enabled():
            loss = auxiliary_loss(logits_TE, routes.expert_TR, self.is_counted_T)
            return penalised(routes, self.penalty * self.share * loss)
        return routes

    def _counted(
        self, logits_TE: Tensor, choose: Callable[[Tensor, Tally | None], Routes]
    ) -> Routes:
        if not self.is_counting:
            return choose(logits_TE, None)
        if self.count_EB is not None:
            return choose(logits_TE, Tally(self.count_EB, self.load_E, self.is_counted_T))
        routes = choose(logits_TE, None)
        self.load_E += loads(routes.expert_TR, len(self.load_E), self.is_counted_T)
        return routes
