"""A decoder layer, and the vocabulary's head, as one GPU has them and as a rank does.

Legend: N sequences, D model width, V vocabulary.

Every rank draws the same whole, and cuts its own part out of it. Both run on the same numbers and
states.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.kernels.router.reference import Routes
from perilune.model.config import ModelConfig
from perilune.model.layer_bench import LayerStep
from perilune.model.linear import linear
from perilune.model.load import part_of
from perilune.model.model import DecoderLayer, freeze
from perilune.model.packed_experts import PackedExperts
from perilune.model.pools import Pooled, StatePool
from perilune.model.ranks import Ranks, share_of

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of ||shared - alone|| / ||alone||. In bf16 every rank's part of a sum is rounded."""


class Equality(NamedTuple):
    error: float
    """The largest of all outputs and states."""
    alike: bool
    """Whether all ranks have the same bits."""
    rerouted: int = 0
    """Tokens that would have gone to other experts: near ties fall either way in bf16. What is
    compared are the results of the same experts."""


class LayerPair:
    """A layer as one GPU has it, and this rank's part, each on pools of its own."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        num_sequences: int,
        context: int,
        ranks: Ranks,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._ranks = ranks
        self.alone = LayerStep(config, index, num_sequences, context, device, dtype)
        self.shared = copy(self.alone)
        self.shared.layer = _cut_layer(self.alone.layer, config, index, ranks)
        freeze(self.shared.layer)
        self.shared.caches = self._cut_pool(self.alone.caches)

    def _cut_pool(self, whole: Pooled) -> Pooled:
        return whole._replace(pool=type(whole.pool)(*self._own(whole.pool)))

    def _own(self, pool: Any) -> list[Tensor]:
        """Copies of this rank's part of a pool."""
        if not isinstance(pool, StatePool):
            return [pool.rows_PBC.clone()]
        own = self._ranks.part(pool.state_SHKV.shape[1])
        heads = slice(own.start, own.stop)
        window = pool.window_SWC.unflatten(-1, (3, pool.state_SHKV.shape[1], -1))
        return [pool.state_SHKV[:, heads].clone(), window[..., heads, :].flatten(-3).contiguous()]

    @torch.inference_mode()
    def compare(self) -> Equality:
        """One step of both."""
        want, routes = _outputs(self.alone, None)
        want += self._own(self.alone.caches.pool)
        got, mine = _outputs(self.shared, routes)
        everywhere = [*got, *mine]
        got += self.shared.caches.pool
        moved = mine.expert_TR.sort(-1).values != routes.expert_TR.sort(-1).values
        return Equality(
            max(_apart(a, b) for a, b in zip(got, want, strict=True)),
            all(_same_everywhere(self._ranks, x) for x in everywhere),
            int(moved.any(-1).sum()),
        )

    def joints(self) -> dict[str, Callable[[], Tensor]]:
        """What joins the ranks in a step: the sums of attention and of the experts."""
        moe, x_ND = self.shared.layer.block_sparse_moe, self.alone.sums[-1]
        n, d = x_ND.shape
        widths = {"attention": d, "experts": d + (moe.latent_size or 0)}
        return {
            f"{name} [{n}, {width}]": partial(self._ranks.sum, x_ND.new_zeros(n, width))
            for name, width in widths.items()
        }


class HeadPair:
    """The product with the vocabulary's head of one GPU, and this rank's part of it."""

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        ranks: Ranks,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        generator = torch.Generator(device).manual_seed(num_sequences)
        d, own = config.hidden_size, ranks.part(config.vocab_size)
        on_device = {"generator": generator, "device": device, "dtype": dtype}
        self._x_ND = torch.randn(num_sequences, d, **on_device)
        self._weight_VD = torch.randn(config.vocab_size, d, **on_device).mul_(d**-0.5)
        self._own_VD = self._weight_VD[own.start : own.stop]
        self._ranks = ranks

    def alone(self) -> Tensor:
        return linear(self._x_ND, self._weight_VD).float()

    def shared(self) -> Tensor:
        return self._ranks.joined(linear(self._x_ND, self._own_VD)).float()

    @torch.inference_mode()
    def compare(self) -> Equality:
        got_NV, want_NV = self.shared(), self.alone()
        return Equality(_apart(got_NV, want_NV), _same_everywhere(self._ranks, got_NV))

    def joints(self) -> dict[str, Callable[[], Tensor]]:
        own_NV = linear(self._x_ND, self._own_VD)
        name = f"logits [{len(own_NV)}, {own_NV.shape[1] * self._ranks.size}]"
        return {name: lambda: self._ranks.joined(own_NV)}


def _cut_layer(whole: DecoderLayer, config: ModelConfig, index: int, ranks: Ranks) -> DecoderLayer:
    with torch.device("meta"):
        layer = DecoderLayer(share_of(config, ranks), index, ranks)
    experts, own = whole.block_sparse_moe.experts, layer.block_sparse_moe.own
    assert isinstance(experts, PackedExperts)
    w13, w2 = (w[own.start : own.stop] for w in (experts.w13, experts.w2))
    layer.block_sparse_moe.experts = PackedExperts(w13, w2, experts.wide)
    shapes = {name: value.shape for name, value in layer.state_dict().items()}
    state = {}
    for name, value in whole.state_dict().items():
        part = part_of(value.shape, shapes[name], ranks)
        cut = value if part is None else value.narrow(part.dim, part.first, part.end - part.first)
        state[name] = cut.contiguous()
    layer.load_state_dict(state, assign=True)
    return layer.eval().requires_grad_(False)


def _outputs(step: LayerStep, routes: Routes | None) -> tuple[list[Tensor], Routes]:
    """What attention and experts put out, by these routes, and the routes it would have taken."""
    moe, found, outputs = step.layer.block_sparse_moe, [], []

    def rerouted(_: Any, __: Any, own: Routes) -> Routes | None:
        found.append(own)
        return routes

    with ExitStack() as stack:
        for module in (step.layer.self_attn, moe):
            hook = module.register_forward_hook(lambda _, __, y_ND: outputs.append(y_ND.clone()))
            stack.callback(hook.remove)
        stack.callback(moe.gate.register_forward_hook(rerouted).remove)
        step()
    return outputs, found[0]


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _same_everywhere(ranks: Ranks, x: Tensor) -> bool:
    others = [torch.empty_like(x) for _ in range(ranks.size)]
    dist.all_gather(others, x.contiguous(), group=ranks.group)
    return all(torch.equal(other, x) for other in others)
