"""Forward and backward of one KDA and one MLA layer, by our ops and by a peer's.

Legend: T packed tokens, E experts, R experts a token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from perilune.kernels.registry import Call, load_attr, recorded, replaced, resolve, spec
from perilune.kernels.router import reference as router_reference
from perilune.kernels.router.reference import Routes
from perilune.model.attn_res import AttnResStream
from perilune.model.config import ModelConfig
from perilune.model.layer_bench import inputs_of, random_layer, require_green, same_again

FLA = {"kda_chunk": "perilune.kernels.kda.plugins:fla_chunk"}
GROUPED = {"experts": "perilune.kernels.experts.grouped:experts"}
"""What a peer takes where the reference loops: one of torch's own products a projection."""


MOST_APART = 0.05
"""Of gradients in bf16, after two layers in which both take the same experts."""


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
        # A sequence: segmented rows, as the trainer packs several documents, fla does not serve.
        self._packing = Packing.of([num_tokens])
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

    def by_peer(**instead: Callable[..., Any]) -> list[Tensor]:
        with replaced({**theirs, **instead}):
            return stack.run()

    with recorded() as calls:
        own = stack.run()
    require_green(calls)
    floor_s = sum(least_seconds(bench(c.op).work(inputs_of(c), True), rates) for c in calls)
    route = as_chosen_in(calls)
    del calls  # and with them what they were given: the peer keeps enough of its own
    error = difference(own, by_peer(router=route))
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


@torch.no_grad()
def as_chosen_in(calls: Sequence[Call]) -> Callable[..., Routes]:
    """A router that takes the experts of those calls, in turn, and weighs them by its own scores.

    Near ties fall either way in bf16, and an expert more or less is no rounding of gradients.
    """
    route = resolve("router")
    chosen = iter([route(*call.args).expert_TR for call in calls if call.op == "router"])

    def again(logits_TE: Tensor, bias_E: Tensor, *weighing: Any) -> Routes:
        above_TE = torch.zeros_like(logits_TE).scatter_(1, next(chosen), 2.0)  # a score is below 1
        return router_reference.route(logits_TE, above_TE, *weighing)

    return again


def difference(ours: list[Tensor], peers: list[Tensor]) -> float:
    squares = [
        (float((a.float() - b.float()).square().sum()), float(b.float().square().sum()))
        for a, b in zip(ours, peers, strict=True)
    ]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5
