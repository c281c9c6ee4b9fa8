"""Every tensor of a checkpoint in the released layout, derived from the configuration.

K3 names carry the prefix `language_model.`; without it they are the names of `Transformer`, except
that routed experts lie in files one by one and in the model stacked (`w13`: w1 rows, then w3 rows).

`A_log` has one value a head. K3 stores 128 entries for 96 heads, the rest zeros. Perilune writes
the K3 layout padded to a multiple of 128 and reads any padding, none included; Kimi Linear stores
[1, 1, H, 1] without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from perilune.kernels.common.mxfp4 import GROUP
from perilune.model.config import ModelConfig, MoEConfig
from perilune.model.shard import DTYPE_BYTES

A_LOG_MULTIPLE = 128
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

VISION_NAME = re.compile(r"(vision_tower|mm_projector)\.")


class TensorSpec(NamedTuple):
    name: str
    """In the file."""
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Accepted, in safetensors' terms; the first one is written."""
    target: str
    """In the model's state dict; "" for a tensor that the text model does not have."""
    kind: Literal["plain", "exact", "a_log", "packed", "scale"] = "plain"
    """`exact` and `a_log` are computed with in fp32 whatever the dtype of the rest."""
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)
    """Of `expert` in the stacked target."""

    @property
    def matrix(self) -> str:
        """Name of the whole that a packed or scale tensor is one half of."""
        return self.name.removesuffix("_packed").removesuffix("_scale")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtypes[0]]

    def fits(self, shape: tuple[int, ...], num_heads: int) -> bool:
        """Whether `shape` is this tensor's; `A_log` may be padded by any amount."""
        if self.kind == "a_log" and len(self.shape) == 1:
            return len(shape) == 1 and shape[0] >= num_heads
        return shape == self.shape


class _Layout:
    """Builds specs of one configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.prefix = "language_model." if config.family == "kimi_k3" else ""
        dtype = STORED_AS[config.dtype]
        self.weight_dtypes = (dtype,)
        # The dtypes of Kimi Linear's release are not verified, and transformers keeps others in
        # fp32 than K3 does: either is accepted where they differ.
        self.fp32 = ("F32",) if config.family == "kimi_k3" else tuple(dict.fromkeys(("F32", dtype)))

    def weight(self, name: str, *shape: int) -> TensorSpec:
        return self._spec(name + ".weight", shape, self.weight_dtypes)

    def exact(self, name: str, *shape: int) -> TensorSpec:
        return self._spec(name, shape, self.fp32)._replace(kind="exact")

    def _spec(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorSpec:
        return TensorSpec(self.prefix + name, shape, dtypes, name)

    def top(self) -> Iterator[TensorSpec]:
        c = self.config
        yield self.weight("model.embed_tokens", c.vocab_size, c.hidden_size)
        if not c.tie_word_embeddings:
            yield self.weight("lm_head", c.vocab_size, c.hidden_size)
        yield self.weight("model.norm", c.hidden_size)
        if c.attn_res_block_size is not None:
            yield self.weight("model.output_attn_res_norm", c.hidden_size)
            yield self.weight("model.output_attn_res_proj", 1, c.hidden_size)

    def layer(self, index: int) -> Iterator[TensorSpec]:
        c, d, name = self.config, self.config.hidden_size, f"model.layers.{index}"
        yield self.weight(f"{name}.input_layernorm", d)
        yield self.weight(f"{name}.post_attention_layernorm", d)
        if c.attn_res_block_size is not None:
            for part in ("self_attention", "mlp"):
                yield self.weight(f"{name}.{part}_res_norm", d)
                yield self.weight(f"{name}.{part}_res_proj", 1, d)
        attn = f"{name}.self_attn"
        yield from self.mla(attn) if c.is_mla(index) else self.kda(attn)
        if c.moe is not None and c.is_moe(index):
            yield from self.moe(f"{name}.block_sparse_moe", c.moe)
        else:
            yield from self.mlp(f"{name}.mlp", c.intermediate_size)

    def kda(self, name: str) -> Iterator[TensorSpec]:
        kda, d = self.config.kda, self.config.hidden_size
        inner = kda.num_heads * kda.head_dim
        for part in "qkv":
            yield self.weight(f"{name}.{part}_proj", inner, d)
            yield self.exact(f"{name}.{part}_conv1d.weight", inner, 1, kda.conv_width)
        heads = (1, 1, kda.num_heads, 1)
        if self.config.family == "kimi_k3":
            heads = (-(-kda.num_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,)
        yield self.exact(f"{name}.A_log", *heads)._replace(kind="a_log")
        yield self.exact(f"{name}.dt_bias", inner)
        yield self.weight(f"{name}.f_a_proj", kda.head_dim, d)
        yield self.weight(f"{name}.f_b_proj", inner, kda.head_dim)
        yield self.weight(f"{name}.b_proj", kda.num_heads, d)
        if kda.full_rank_gate:
            yield self.weight(f"{name}.g_proj", inner, d)
        else:
            yield self.weight(f"{name}.g_a_proj", kda.head_dim, d)
            yield self.weight(f"{name}.g_b_proj", inner, kda.head_dim)
        yield self.exact(f"{name}.o_norm.weight", kda.head_dim)
        yield self.weight(f"{name}.o_proj", d, inner)

    def mla(self, name: str) -> Iterator[TensorSpec]:
        mla, d = self.config.mla, self.config.hidden_size
        q_width, v_width = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
        if mla.q_lora_rank is None:
            yield self.weight(f"{name}.q_proj", q_width, d)
        else:
            yield self.weight(f"{name}.q_a_proj", mla.q_lora_rank, d)
            yield self.weight(f"{name}.q_a_layernorm", mla.q_lora_rank)
            yield self.weight(f"{name}.q_b_proj", q_width, mla.q_lora_rank)
        kv_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield self.weight(f"{name}.kv_a_proj_with_mqa", mla.cache_width, d)
        yield self.weight(f"{name}.kv_a_layernorm", mla.kv_lora_rank)
        yield self.weight(f"{name}.kv_b_proj", kv_width, mla.kv_lora_rank)
        if mla.output_gate:
            yield self.weight(f"{name}.g_proj", v_width, d)
        yield self.weight(f"{name}.o_proj", d, v_width)

    def mlp(self, name: str, width: int) -> Iterator[TensorSpec]:
        d = self.config.hidden_size
        yield self.weight(f"{name}.gate_proj", width, d)
        yield self.weight(f"{name}.up_proj", width, d)
        yield self.weight(f"{name}.down_proj", d, width)

    def moe(self, name: str, moe: MoEConfig) -> Iterator[TensorSpec]:
        d = self.config.hidden_size
        gate = self.weight(f"{name}.gate", moe.num_experts, d)
        either = tuple(dict.fromkeys((*gate.dtypes, self.fp32[0])))
        yield gate._replace(dtypes=either if self.config.family == "kimi_linear" else gate.dtypes)
        yield self.exact(f"{name}.gate.e_score_correction_bias", moe.num_experts)
        if moe.latent_size is not None:
            yield self.weight(f"{name}.routed_expert_down_proj", moe.latent_size, d)
            if moe.latent_norm:
                yield self.weight(f"{name}.routed_expert_norm", moe.latent_size)
            yield self.weight(f"{name}.routed_expert_up_proj", d, moe.latent_size)
        if moe.num_shared_experts:
            width = moe.num_shared_experts * moe.intermediate_size
            yield from self.mlp(f"{name}.shared_experts", width)

    def expert(self, layer: int, moe: MoEConfig, index: int) -> Iterator[TensorSpec]:
        width, inner = moe.latent_size or self.config.hidden_size, moe.intermediate_size
        name = f"model.layers.{layer}.block_sparse_moe.experts"
        for matrix, stack, first, shape in (
            ("w1", "w13", 0, (inner, width)),
            ("w3", "w13", inner, (inner, width)),
            ("w2", "w2", 0, (width, inner)),
        ):
            rows = (first, first + shape[0])
            file_name, target = f"{self.prefix}{name}.{index}.{matrix}.weight", f"{name}.{stack}"
            if not self.config.experts_mxfp4:
                yield TensorSpec(file_name, shape, self.weight_dtypes, target, "plain", index, rows)
                continue
            out, columns = shape
            packed, scale = (out, columns // 2), (out, columns // GROUP)
            yield TensorSpec(f"{file_name}_packed", packed, ("U8",), target, "packed", index, rows)
            yield TensorSpec(f"{file_name}_scale", scale, ("U8",), target, "scale", index, rows)


def dense_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Everything of the text model but its routed experts."""
    layout = _Layout(config)
    yield from layout.top()
    for index in range(config.num_layers):
        yield from layout.layer(index)


def expert_tensors(config: ModelConfig, layer: int, expert: int) -> Iterator[TensorSpec]:
    """The matrices of one routed expert; nothing in a dense layer."""
    if config.moe is not None and config.is_moe(layer):
        yield from _Layout(config).expert(layer, config.moe, expert)


def text_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the text model: 497,052 for K3, whose other 168 are vision."""
    yield from dense_tensors(config)
    layout, moe = _Layout(config), config.moe
    for layer in range(config.num_layers):
        if moe is not None and config.is_moe(layer):
            for expert in range(moe.num_experts):
                yield from layout.expert(layer, moe, expert)


def vision_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """The vision tower (MoonViT-V2) and projector of K3's release: known by name, never loaded."""
    if config.has_vision:
        for name, shape in _vision_shapes(config.hidden_size):
            yield TensorSpec(f"{name}.weight", shape, ("BF16",), "")


def _vision_shapes(text_width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, qkv, merged = 1024, 4096, 1536, 4 * 1024
    yield "vision_tower.patch_embed.proj", (width, 3, 14, 14)
    yield "vision_tower.patch_embed.pos_emb", (64, 64, width)
    for index in range(27):
        block = f"vision_tower.encoder.blocks.{index}"
        yield f"{block}.wqkv", (3 * qkv, width)
        yield f"{block}.wo", (width, qkv)
        yield f"{block}.mlp.fc0", (inner, width)
        yield f"{block}.mlp.fc1", (width, inner)
        yield f"{block}.norm0", (width,)
        yield f"{block}.norm1", (width,)
    yield "vision_tower.encoder.final_layernorm", (width,)
    yield "mm_projector.proj.0", (merged, merged)
    yield "mm_projector.proj.2", (text_width, merged)
    yield "mm_projector.post_norm", (text_width,)
