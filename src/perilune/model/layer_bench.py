"""A decoder layer's decode step, whole and op by op, each beside its floor.

Legend: N sequences, D model width, T = N tokens.

The layer runs as the model runs it. Its ops are those that the registry was asked for meanwhile;
each is timed alone on copies of what it was given, and the sum of their floors is the layer's. What
is between the ops (copies, gates) has no floor of its own, so that it counts against the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.bench import subject
from perilune.kernels.bench.cases import bench
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.floors import least_seconds
from perilune.kernels.bench.inputs import TIMES_CACHE, cache_bytes
from perilune.kernels.bench.rounds import Settings, Spread, measure
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.bench.subject import choose
from perilune.kernels.experts.bench_cases import weights as packed_weights
from perilune.kernels.registry import Call, Inputs, load_attr, recorded, resolve, spec
from perilune.model.attn_res import AttnResStream
from perilune.model.config import ModelConfig
from perilune.model.model import DecoderLayer, freeze
from perilune.model.packed_experts import PackedExperts
from perilune.model.pools import Pooled, Pools
from perilune.model.step import PAGE, Decoding

MAX_COPIES = 64


class Timed(NamedTuple):
    name: str
    spread: Spread
    floor_s: float


class LayerTimes(NamedTuple):
    whole: Timed
    parts: list[Timed]


class LayerStep:
    """A layer with random weights, and N sequences that have `context` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        num_sequences: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(num_sequences)
        self.layer = random_layer(config, index, device, dtype, self._generator, packed=True)
        self.layer.eval().requires_grad_(False)
        freeze(self.layer)
        self.caches = self._pooled(config, index, num_sequences, context, device, dtype)
        blocks = 1 + index // (config.attn_res_block_size or 1)
        self.sums = [self._drawn(num_sequences, config, device, dtype) for _ in range(blocks + 2)]

    def _drawn(
        self, n: int, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        shape = n, config.hidden_size
        return torch.randn(shape, generator=self._generator, device=device, dtype=dtype)

    def _pooled(
        self,
        config: ModelConfig,
        index: int,
        n: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Pooled:
        pages = -(-context // PAGE)
        mla_layers = (0,) if config.is_mla(index) else ()
        pools = Pools.of(
            replace(config, num_layers=1, mla_layers=mla_layers),
            slots=n,
            pages=n * pages + 1,
            device=device,
            dtype=dtype,
        )
        [pool] = pools.layers
        for tensor in pool:
            tensor.normal_(generator=self._generator)
        slots = self._shuffled(n, device).tolist()
        table = (self._shuffled(n * pages, device) + 1).view(n, pages).cpu().numpy()
        step = pools.step([Decoding(*each, context) for each in zip(slots, table, strict=True)])
        return Pooled(pool, step)

    def _shuffled(self, n: int, device: torch.device) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=device)

    @torch.inference_mode()
    def __call__(self) -> AttnResStream:
        """A step of all sequences: both reads, with the update of the layer before."""
        *blocks, partial, update = self.sums
        stream = AttnResStream(partial)
        stream.blocks, stream.update = list(blocks), update
        self.layer(stream, None, self.caches)
        return stream


@torch.no_grad()
def random_layer(
    config: ModelConfig,
    index: int,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    packed: bool = False,
) -> DecoderLayer:
    """With matrices that keep the size of what goes through them; `packed`: experts in MXFP4."""
    with torch.device("meta"):
        layer = DecoderLayer(config, index)
    if packed:
        del layer.block_sparse_moe.experts  # nothing is laid out for the wide ones
    layer = layer.to(dtype).to_empty(device=device)
    for name, p in [*layer.named_parameters(), *layer.named_buffers()]:
        if "norm" in name:
            p.fill_(1.0)
        else:
            p.normal_(0.0, p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1, generator=generator)
    if packed:
        layer.block_sparse_moe.experts = _packed_experts(config, generator)
    return layer


def _packed_experts(config: ModelConfig, generator: torch.Generator) -> PackedExperts:
    moe = config.moe
    assert moe is not None
    width, inner = moe.latent_size or config.hidden_size, moe.intermediate_size
    drawn = packed_weights(moe.num_experts, width, inner)(generator, torch.bfloat16)
    return PackedExperts(drawn["w13_EMKW"], drawn["w2_EMKW"], drawn["wide"])


def measure_layer(step: LayerStep, device: torch.device, rates: Ceilings, s: float) -> LayerTimes:
    """The whole in a graph where there are graphs, and every op that it calls; `s` seconds each.

    Raises:
        RefusedError: an op is red.
    """
    with recorded() as calls:
        step()
    require_green(calls)
    settings, watch = Settings(seconds=s), stopwatch(device)
    floors = [least_seconds(bench(c.op).work(inputs_of(c), False), rates) for c in calls]

    def timed(name: str, runs: Sequence[Callable[[], Any]], floor_s: float) -> Timed:
        contender = _contender(name, runs, device)
        return Timed(name, measure([contender], same_again, watch, settings).spreads[0], floor_s)

    whole = timed("the layer", [step] * 4, sum(floors))
    parts = [
        timed(_name(call), [*_copies(call, device)], floor_s)
        for call, floor_s in zip(calls, floors, strict=True)
    ]
    return LayerTimes(whole, parts)


def require_green(calls: Sequence[Call]) -> None:
    """Runs the conformance of every op among `calls`, as it runs on their device, once a process.

    Raises:
        RefusedError: one is red.
    """
    kinds = {(call.op, _tensors(call.args)[0].device.type) for call in calls}
    for op, kind in sorted(kinds - _green):
        subject.require_green(spec(op), choose(spec(op), kind, None).backend)
        _green.add((op, kind))


_green: set[tuple[str, str]] = set()


def same_again() -> None:
    """Nothing is made new between rounds: a step finds the same weights as the one before."""


def _contender(name: str, runs: Sequence[Callable[[], Any]], device: torch.device) -> Contender:
    return (GraphContender if device.type == "cuda" else Contender)(name, runs)


def _name(call: Call) -> str:
    weight = inputs_of(call).get("weight_OI")
    return call.op if weight is None else f"{call.op} {weight.shape[1]} to {weight.shape[0]}"


def inputs_of(call: Call) -> Inputs:
    """Its arguments by the names of the op's reference."""
    signature = inspect.signature(load_attr(spec(call.op).reference))
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _copies(call: Call, device: torch.device) -> list[Callable[[], Any]]:
    """The call again, on so many copies of its tensors that no cache holds them all."""
    op = resolve(call.op)
    size = sum(x.numel() * x.element_size() for x in _tensors(call.args))
    beyond = TIMES_CACHE[device.type] * cache_bytes(device)
    count = min(MAX_COPIES, -(-beyond // max(1, size)))
    given = [call.args] + [_cloned(call.args) for _ in range(count - 1)]
    return [lambda args=args: op(*args, **call.kwargs) for args in given]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _tensors(each)] if isinstance(value, list | tuple) else []


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(_cloned(each) for each in value)
    return value
