"""Parameters, stored bytes and cache bytes of a configuration, by arithmetic alone.

Cache sizes are one sequence's: KDA states in fp32, convolution taps and latents in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from perilune.model.config import ModelConfig
from perilune.model.tensors import TensorSpec, dense_tensors, expert_tensors, vision_tensors

STATE_BYTES = 4
BF16_BYTES = 2
GQA_HEADS, GQA_HEAD_DIM = 8, 128
"""The yardstick beside MLA: grouped-query attention as most open models have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    total: int
    """Of the text model."""
    with_vision: int
    routed_experts: int
    input_embedding: int
    activated: int
    """A token's share of the text model: the chosen experts and `lm_head`, but not the input
    embedding, whose rows are looked up and not multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint in the released layout, scales and padding included."""

    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Bytes that one sequence of `context` tokens keeps."""

    context: int
    kda_state: int
    conv_taps: int
    latent_per_token: int
    latent: int
    all_mla: int
    """The same model with MLA in every layer."""
    gqa: int
    """The same model with `GQA_HEADS` key-value heads of `GQA_HEAD_DIM` in every layer, bf16."""
    crossover: int | None
    """First context at which the hybrid is smaller than all-MLA; None: no KDA layer, never."""
    crossover_state_only: int | None
    """The same when the convolution taps are not counted."""

    @property
    def total(self) -> int:
        return self.kda_state + self.conv_taps + self.latent

    @property
    def saving_over_all_mla(self) -> float:
        """1 - total / all-MLA: negative where the hybrid is the larger one."""
        return 1 - self.total / self.all_mla

    @property
    def saving_over_gqa(self) -> float:
        return 1 - self.total / self.gqa


def count_parameters(config: ModelConfig) -> Parameters:
    dense = _parameters(config, dense_tensors(config))
    vision = _parameters(config, vision_tensors(config))
    embedding = config.vocab_size * config.hidden_size
    expert = _parameters(config, _one_expert_a_layer(config))
    per_token = config.moe.num_experts_per_token if config.moe is not None else 0
    routed = expert * (config.moe.num_experts if config.moe is not None else 0)
    # A tied embedding is multiplied too, as the head.
    looked_up = 0 if config.tie_word_embeddings else embedding
    return Parameters(
        total=dense + routed,
        with_vision=dense + routed + vision,
        routed_experts=routed,
        input_embedding=embedding,
        activated=dense - looked_up + per_token * expert,
    )


def count_stored(config: ModelConfig) -> Stored:
    experts = config.moe.num_experts if config.moe is not None else 0
    once = [*dense_tensors(config), *vision_tensors(config)]
    each = list(_one_expert_a_layer(config))
    return Stored(
        tensors=len(once) + experts * len(each),
        elements=sum(s.num_elements for s in once) + experts * sum(s.num_elements for s in each),
        bytes=sum(s.num_bytes for s in once) + experts * sum(s.num_bytes for s in each),
    )


def cache_sizes(config: ModelConfig, context: int) -> CacheSizes:
    """Sizes at `context` tokens.

    Source of the K3 figures: the technical report's cache layout (arXiv 2607.24653, 5.4).
    """
    kda, num_mla = config.kda, len(config.mla_layers)
    num_kda = config.num_layers - num_mla
    inner = kda.num_heads * kda.head_dim
    state = num_kda * inner * kda.head_dim * STATE_BYTES
    taps = num_kda * (kda.conv_width - 1) * 3 * inner * BF16_BYTES
    row = config.mla.cache_width * BF16_BYTES
    gqa_row = 2 * GQA_HEADS * GQA_HEAD_DIM * BF16_BYTES
    return CacheSizes(
        context=context,
        kda_state=state,
        conv_taps=taps,
        latent_per_token=num_mla * row,
        latent=num_mla * row * context,
        all_mla=config.num_layers * row * context,
        gqa=config.num_layers * gqa_row * context,
        crossover=(state + taps) // (num_kda * row) + 1 if num_kda else None,
        crossover_state_only=state // (num_kda * row) + 1 if num_kda else None,
    )


def layer_pattern(config: ModelConfig) -> str:
    """The stack in one line, such as `23 x (KDA KDA KDA MLA), 1 x (MLA)`."""
    groups: list[list[str]] = [[]]
    for layer in range(config.num_layers):
        groups[-1].append("MLA" if config.is_mla(layer) else "KDA")
        if config.is_mla(layer):
            groups.append([])
    named = (" ".join(group) for group in groups if group)
    return ", ".join(f"{len(list(same))} x ({group})" for group, same in groupby(named))


def _one_expert_a_layer(config: ModelConfig) -> Iterator[TensorSpec]:
    for layer in range(config.num_layers):
        yield from expert_tensors(config, layer, 0)


def _parameters(config: ModelConfig, specs: Iterable[TensorSpec]) -> int:
    return sum(_values(config, spec) for spec in specs)


def _values(config: ModelConfig, spec: TensorSpec) -> int:
    """Numbers that the network computes with: no padding, no scale; two codes lie in a byte."""
    if spec.kind == "a_log":
        return config.kda.num_heads
    return {"packed": 2, "scale": 0}.get(spec.kind, 1) * spec.num_elements
