"""Forward and backward of one KDA and one MLA layer, by our ops and by a peer's.

Legend: T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.bench.cases import bench
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.contender import Contender
from perilune.kernels.bench.errors import DishonestError
from perilune.kernels.bench.floors import least_seconds
from perilune.kernels.bench.rounds import Settings, Spread, measure
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import load_attr, recorded, replaced, spec
from perilune.model.attn_res import AttnResStream
from perilune.model.config import ModelConfig
from perilune.model.layer_bench import inputs_of, random_layer, require_green, same_again

FLA = {"kda_chunk": "perilune.kernels.kda.plugins:fla_chunk"}
GROUPED = {"experts": "perilune.kernels.experts.grouped:experts"}
"""What a peer takes where the reference loops: one of torch's own products a projection."""


MOST_APART = 0.1
"""Of gradients in bf16, after two layers with experts that near ties choose."""


class StackTimes(NamedTuple):
    ours: Spread
    peer: Spread
    floor_s: float
    difference: float
    """Of all gradients: ||ours - peer's|| / ||peer's||."""


class Stack(nn.Module):
    """Layers with random weights, and the sums that they read."""

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, ...],
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(num_tokens)
        self.layers = nn.ModuleList(
            random_layer(config, index, device, dtype, generator) for index in layers
        )
        blocks = 1 + layers[0] // (config.attn_res_block_size or 1)
        shape = blocks + 2, num_tokens, config.hidden_size
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self._sums = [x.clone().requires_grad_() for x in drawn[:-1]]
        self.grad_TD = drawn[-1]
        # As the trainer packs it: one document here.
        self._packing = Packing.rows(torch.zeros(1, num_tokens, dtype=torch.int64, device=device))
        self.train().requires_grad_(True)
        self._leaves = [*self._sums, *self.parameters()]

    def run(self) -> list[Tensor]:
        """Gradients of the sums and of every weight."""
        *blocks, partial = self._sums
        stream = AttnResStream(partial)
        stream.blocks = list(blocks)
        for layer in self.layers:
            layer(stream, self._packing, None)
        stream.commit()
        grads = torch.autograd.grad(
            stream.blocks[-1], self._leaves, self.grad_TD, allow_unused=True
        )
        return [grad for grad in grads if grad is not None]


def with_experts(config: ModelConfig, num_experts: int) -> ModelConfig:
    """The share of one GPU: gradients of all experts would not fit beside their weights."""
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, num_experts=num_experts))


def peers_ops(ops: set[str]) -> dict[str, Callable[..., Any]]:
    """fla's KDA and plain PyTorch for the rest."""
    paths: Mapping[str, str] = FLA | GROUPED
    return {op: load_attr(paths.get(op, spec(op).reference)) for op in ops}


def measure_stack(
    stack: Stack, theirs: Mapping[str, Callable[..., Any]], rates: Ceilings, s: float
) -> StackTimes:
    """Both take turns in one process.

    Raises:
        RefusedError: an op is red, or both do not compute the same.
    """

    def by_peer() -> list[Tensor]:
        with replaced(theirs):
            return stack.run()

    with recorded() as calls:
        own = stack.run()
    require_green(calls)
    floor_s = sum(least_seconds(bench(c.op).work(inputs_of(c), True), rates) for c in calls)
    error = difference(own, by_peer())
    if not error <= MOST_APART:
        raise DishonestError(f"gradients are {error:.1e} from the peer's: one of both is wrong")
    del own
    contenders = [
        Contender("ours", [stack.run], backward=True),
        Contender("peer", [by_peer], backward=True),
    ]
    device = stack.grad_TD.device
    ours, peer = measure(contenders, same_again, stopwatch(device), Settings(seconds=s)).spreads
    return StackTimes(ours, peer, floor_s, error)


def difference(ours: list[Tensor], peers: list[Tensor]) -> float:
    squares = [
        (float((a.float() - b.float()).square().sum()), float(b.float().square().sum()))
        for a, b in zip(ours, peers, strict=True)
    ]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5
