"""What a step has to move and to multiply at least, by arithmetic on sizes.

Four parts, each by the slower of memory and tensor cores: dense weights, once; the experts that
were chosen, once; states, read and written; cached tokens, read. Activations are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from perilune.kernels.bench.cases import Work
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.floors import least_seconds
from perilune.model.config import ModelConfig
from perilune.model.contexts.plan import GQA, NUM_LAYERS, cache_bytes, sizes_of, stack_config
from perilune.model.model import DecoderLayer
from perilune.model.packed_experts import PackedExperts
from perilune.model.sizes import GQA_HEAD_DIM, GQA_HEADS

STATE_FLOPS = 7
"""A number of a state and token: decay, delta rule, query."""


class Roofline(NamedTuple):
    parts: Mapping[str, Work]

    def seconds(self, rates: Ceilings) -> dict[str, float]:
        """Of each part: what runs after one another does not overlap."""
        return {name: least_seconds(work, rates) for name, work in self.parts.items()}


def roofline(
    config: ModelConfig,
    stack: str,
    layers: Sequence[DecoderLayer],
    num_sequences: int,
    context: int,
    chosen: Sequence[int],
) -> Roofline:
    """Of a decode step; `chosen`: different experts in each layer."""
    n, of_stack = num_sequences, stack_config(config, stack)
    weights = [p for layer in layers for p in layer.parameters()]
    multiplied = sum(p.numel() for p in weights if p.ndim > 1)
    parts = {
        "dense weights": Work(sum(p.nbytes for p in weights), 2 * n * multiplied),
        "experts": _experts(config, layers, n, chosen),
    }
    if stack == GQA:
        heads = -(-config.mla.num_heads // GQA_HEADS) * GQA_HEADS
        flops = 4 * n * context * heads * GQA_HEAD_DIM * NUM_LAYERS
        return Roofline(
            {**parts, "keys and values": Work(n * cache_bytes(config, GQA, context), flops)}
        )
    num_mla = len(of_stack.mla_layers)
    if num_mla < NUM_LAYERS:
        parts["states"] = _states(config, n, NUM_LAYERS - num_mla)
    mla = config.mla
    row_flops = 2 * mla.num_heads * (mla.cache_width + mla.kv_lora_rank)
    row_bytes = sizes_of(config, context).latent_per_token
    parts["latents"] = Work(n * context * row_bytes * num_mla, n * context * row_flops * num_mla)
    return Roofline(parts)


def prefill_flops(config: ModelConfig, layers: Sequence[DecoderLayer], num_tokens: int) -> int:
    """Of the hybrid's dense weights, experts and causal attention; without the recurrence, and
    without making keys and values of cached rows again for each chunk."""
    mla, weights = config.mla, [p for layer in layers for p in layer.parameters()]
    dense = 2 * num_tokens * sum(p.numel() for p in weights if p.ndim > 1)
    experts = _experts(config, layers, num_tokens, []).flops
    pair_flops = 2 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim)
    return dense + experts + num_tokens * (num_tokens + 1) // 2 * pair_flops


def expected_experts(config: ModelConfig, num_tokens: int) -> float:
    """Different ones in a layer, where every token chooses any with the same chance."""
    moe = config.moe
    assert moe is not None
    left_out = 1 - moe.num_experts_per_token / moe.num_experts
    return moe.num_experts * (1 - left_out**num_tokens)


def weight_bytes(layers: Sequence[DecoderLayer]) -> int:
    """All that lies in memory, experts included."""
    return sum(x.nbytes for layer in layers for x in (*layer.parameters(), *layer.buffers()))


def _experts(
    config: ModelConfig, layers: Sequence[DecoderLayer], n: int, chosen: Sequence[int]
) -> Work:
    moe = config.moe
    assert moe is not None
    experts = layers[0].block_sparse_moe.experts
    assert isinstance(experts, PackedExperts), type(experts)
    one = experts.w13[0].nbytes + experts.w2[0].nbytes
    width = moe.latent_size or config.hidden_size
    pairs = n * moe.num_experts_per_token * len(layers)
    return Work(sum(chosen) * one, 6 * pairs * width * moe.intermediate_size)


def _states(config: ModelConfig, n: int, num_kda: int) -> Work:
    sizes, kda = sizes_of(config, 0), config.kda
    numbers = num_kda * kda.num_heads * kda.head_dim**2
    return Work(2 * n * (sizes.kda_state + sizes.conv_taps), STATE_FLOPS * n * numbers)
