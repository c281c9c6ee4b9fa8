"""A step's balancing: what all layers count, added up over ranks, and their next biases.

Legend: T tokens, L layers, E experts, R experts a token, B bins of a histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from perilune.model.moe import MoE
from perilune.train.balance.layer import LayerBalancer
from perilune.train.balance.loads import LoadStats, load_stats
from perilune.train.balance.rules import RULES, Counted
from perilune.train.config import BalanceConfig


class Balancing:
    """Puts a `LayerBalancer` into every router that has a choice, and moves their biases.

    A step is forward passes inside `counting`, and one `update`. Backward passes stay outside, so
    that what they compute again is not counted again.
    """

    def __init__(
        self,
        layers: Sequence[MoE],
        config: BalanceConfig,
        summed: Callable[[Tensor], Tensor] = lambda counts: counts,
    ) -> None:
        """`summed` adds integers up over the ranks whose tokens make up a step."""
        self.config, self.summed, self.rule = config, summed, RULES[config.rule]
        self.gates = [layer.gate for layer in layers if _has_choice(layer)]
        bins = config.bins if self.rule.has_histogram else 0
        penalty = config.auxiliary_weight if self.rule.has_penalty else 0.0
        self.balancers = [
            LayerBalancer(gate.moe.num_experts, bins, penalty, gate.weight.device)
            for gate in self.gates
        ]
        for gate, balancer in zip(self.gates, self.balancers, strict=True):
            gate.balancer = balancer.train(gate.training)
        device = self.gates[0].weight.device if self.gates else None
        self.num_tokens = torch.zeros(1, dtype=torch.int32, device=device)

    @contextmanager
    def counting(self, is_counted_T: Tensor, share: float | Tensor = 1.0) -> Generator[None]:
        """The forward pass of a micro-batch, in which `is_counted_T` (bool) is False for padding.

        `share` is the weight of the micro-batch in the step's loss; the auxiliary loss takes it
        too.
        """
        if self.gates:
            self.num_tokens += is_counted_T.sum(dtype=torch.int32)
        for balancer in self.balancers:
            balancer.is_counted_T, balancer.share = is_counted_T, share
            balancer.is_counting = True
        try:
            yield
        finally:
            for balancer in self.balancers:
                balancer.is_counting = False

    @torch.no_grad()
    def update(self) -> LoadStats:
        """Writes the biases of the next step, and clears what was counted in this one."""
        if not self.gates:
            zero = self.num_tokens.new_zeros((), dtype=torch.float64)
            return LoadStats(max_violation=zero, load_entropy=zero + 1, dropped=zero)
        counted, num_tokens = self._summed()
        next_LE = self.rule.next_bias(counted, self.config)
        biases = [gate.e_score_correction_bias for gate in self.gates]
        torch._foreach_copy_(biases, list(next_LE.unbind()))
        stats = load_stats(counted.load_LE, num_tokens * counted.num_active)
        torch._foreach_zero_([*self._counters(), self.num_tokens])
        return stats

    def _counters(self) -> list[Tensor]:
        histograms = [b.count_EB for b in self.balancers if b.count_EB is not None]
        return [*histograms, *(b.load_E for b in self.balancers)]

    def _summed(self) -> tuple[Counted, Tensor]:
        """Counts of all ranks, in one integer all-reduce."""
        counters = [*self._counters(), self.num_tokens]
        flat = self.summed(torch.cat([counter.flatten() for counter in counters]))
        parts = flat.split([counter.numel() for counter in counters])
        sums = [part.view_as(counter) for part, counter in zip(parts, counters, strict=True)]
        num_layers = len(self.gates)
        counted = Counted(
            bias_LE=torch.stack([gate.e_score_correction_bias for gate in self.gates]),
            load_LE=torch.stack(sums[-1 - num_layers : -1]),
            count_LEB=torch.stack(sums[:num_layers]) if self.rule.has_histogram else None,
            num_active=self.gates[0].moe.num_experts_per_token,
        )
        return counted, sums[-1]


def _has_choice(layer: MoE) -> bool:
    """Where all experts answer every token, nothing can be balanced."""
    moe = layer.gate.moe
    return moe.num_experts_per_token < moe.num_experts
