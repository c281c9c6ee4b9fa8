"""Four layers with random weights, and sequences whose caches are full, ready to decode.

Legend: N sequences, D model width, T tokens, L cached tokens.

Speed does not depend on values but for the choice of experts: what goes in is drawn for each
sequence apart, and no expert is preferred, so that choices are spread as in a balanced model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from perilune.kernels.bench.gqa_paths import Fastest, fastest, paths
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.model.attn_res import AttnResStream, PlainStream
from perilune.model.config import ModelConfig
from perilune.model.contexts.gqa import GQA, GQACache
from perilune.model.contexts.plan import ALL_MLA, HYBRID, NUM_LAYERS, first_layer, stack_config
from perilune.model.layer_bench import random_layer
from perilune.model.model import DecoderLayer, freeze
from perilune.model.pools import Pooled, Pools, StepOnPools
from perilune.model.step import PAGE, Decoding, Step


def random_layers(
    config: ModelConfig, stack: str, generator: torch.Generator, dtype: torch.dtype
) -> list[DecoderLayer]:
    """From the middle of the model, with experts in MXFP4; frozen."""
    first = first_layer(config)
    if stack != HYBRID:
        config = replace(config, mla_layers=tuple(range(first, first + NUM_LAYERS)))
    layers = []
    for index in range(first, first + NUM_LAYERS):
        layer = random_layer(config, index, generator.device, dtype, generator, packed=True)
        layer.block_sparse_moe.gate.e_score_correction_bias.zero_()
        if stack not in (HYBRID, ALL_MLA):
            sizes = config.hidden_size, config.mla.num_heads
            layer.add_module("self_attn", GQA.random(*sizes, generator, dtype))
        layer.eval().requires_grad_(False)
        freeze(layer)
        layers.append(layer)
    return layers


class Inputs:
    """The sums that the first of the layers reads, for T tokens."""

    def __init__(
        self, config: ModelConfig, num_tokens: int, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        self._has_blocks = config.attn_res_block_size is not None
        blocks = 1 + first_layer(config) // (config.attn_res_block_size or config.num_layers)
        shape = blocks + 1, num_tokens, config.hidden_size
        *self._blocks, self._partial = torch.empty(
            shape, device=generator.device, dtype=dtype
        ).normal_(generator=generator)

    def through(
        self, layers: Sequence[DecoderLayer], caches: Callable[[int], Pooled | None]
    ) -> Tensor:
        """[T, D]: what the last layer adds."""
        if not self._has_blocks:
            plain = PlainStream(self._partial)
            for i, layer in enumerate(layers):
                layer(plain, None, caches(i))
            return plain.hidden
        stream = AttnResStream(self._partial)
        stream.blocks = list(self._blocks)
        for i, layer in enumerate(layers):
            layer(stream, None, caches(i))
        assert stream.update is not None
        return stream.update


class StackStep(Protocol):
    """A step of N sequences of `context` tokens, the new one included."""

    context: int
    num_sequences: int

    def __call__(self) -> Tensor: ...

    def load(self, num_tokens: int) -> None:
        """The next call, and a graph that was captured of one, decodes at so many tokens."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Allocated for what sequences own."""
        ...

    @property
    def attention(self) -> Fastest | None:
        """Which of several ways serves; None: the registry's."""
        ...


def filled_pools(
    config: ModelConfig, slots: int, pages: int, generator: torch.Generator, dtype: torch.dtype
) -> Pools:
    """Of random numbers."""
    pools = Pools.of(config, slots=slots, pages=pages, device=generator.device, dtype=dtype)
    for tensor in (pools.state_LSHKV, pools.window_LSWC, pools.rows_LPBC):
        tensor.normal_(generator=generator)
    return pools


class PooledStep:
    """Of the hybrid and the all-MLA stack; slots and pages in no order."""

    attention = None

    def __init__(
        self,
        config: ModelConfig,
        stack: str,
        layers: Sequence[DecoderLayer],
        context: int,
        num_sequences: int,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        n, pages = num_sequences, -(-context // PAGE)
        self.context, self.num_sequences = context, n
        self._layers, self._table_width = layers, pages
        sizes = n, n * pages + 1
        self.pools = filled_pools(stack_config(config, stack), *sizes, generator, dtype)
        self._slots = _shuffled(n, generator).tolist()
        table_NW = (_shuffled(n * pages, generator) + 1).int().view(n, pages)
        self._pages = list(table_NW.cpu().numpy())
        self._inputs = Inputs(config, n, generator, dtype)
        self._step = self._step_at(context)

    def _step_at(self, num_tokens: int) -> Step:
        decoding = [
            Decoding(slot, pages, num_tokens)
            for slot, pages in zip(self._slots, self._pages, strict=True)
        ]
        fixed = {"padded_to": self.num_sequences, "table_width": self._table_width}
        return self.pools.step(decoding, **fixed)

    def load(self, num_tokens: int) -> None:
        self._step.load(self._step_at(num_tokens))

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        return self._inputs.through(self._layers, StepOnPools(self.pools.layers, self._step).of)

    @property
    def cache_bytes(self) -> int:
        """Without the scratch page, which is nobody's."""
        return self.pools.nbytes - self.pools.page_nbytes


class GQAStep:
    """Of the yardstick: always at its whole context, with no work on the host."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        context: int,
        num_sequences: int,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        self.context, self.num_sequences = context, num_sequences
        self._layers = layers
        self._inputs = Inputs(config, num_sequences, generator, dtype)
        self._attentions = [_gqa_of(layer) for layer in layers]
        for gqa in self._attentions:
            gqa.cache = GQACache.of(num_sequences, context, generator, dtype)
        self.attention = self._choose(generator)
        for gqa in self._attentions:
            gqa.attend = self.attention.attend

    def _choose(self, generator: torch.Generator) -> Fastest:
        caches = [gqa.cache for gqa in self._attentions if gqa.cache is not None]
        keys, device = caches[0].k_NGLK, generator.device
        shape = self.num_sequences, self._attentions[0].num_heads, keys.shape[3]
        q_NHK = torch.empty(shape, device=device, dtype=keys.dtype).normal_(generator=generator)
        return fastest(paths(device), q_NHK, caches, stopwatch(device))

    def load(self, num_tokens: int) -> None:
        """Nothing: a peer is not charged for its host."""

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        return self._inputs.through(self._layers, lambda _: None)

    @property
    def cache_bytes(self) -> int:
        return sum(gqa.cache.nbytes for gqa in self._attentions if gqa.cache is not None)

    def free(self) -> None:
        """The layers stay, and would keep what they were given."""
        for gqa in self._attentions:
            gqa.cache = gqa.attend = None


def _gqa_of(layer: DecoderLayer) -> GQA:
    attention = layer.get_submodule("self_attn")
    assert isinstance(attention, GQA), type(attention)
    return attention


def _shuffled(n: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(n, generator=generator, device=generator.device)
