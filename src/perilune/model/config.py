"""`config.json` of the Kimi K3 and Kimi Linear families as one frozen value.

Layer numbers are zero-based here; the files count from one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from perilune.core.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention. `head_dim` is both the key and the value width."""

    num_heads: int
    head_dim: int
    conv_width: int = 4
    gate_lower_bound: float | None = -5.0
    """K3: log-decay in (bound, 0) through a sigmoid. None: Kimi Linear's unbounded softplus."""
    full_rank_gate: bool = True
    """K3: one output-gate matrix. False: Kimi Linear's bottleneck of `head_dim`."""

    def __post_init__(self) -> None:
        bound = self.gate_lower_bound
        # The chunk form of KDA divides by decays: beyond -5 its factors would leave the fp32 range.
        if bound is not None and not -5.0 <= bound < 0:
            raise UnsupportedError(f"gate_lower_bound must lie in [-5, 0), not {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention without positions (NoPE)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Channels shared by all heads; the name is historical, nothing is rotated."""
    v_head_dim: int
    output_gate: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: the normalised latent and the shared key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    """Width inside one routed expert; the shared experts are one MLP of this times their number."""
    latent_size: int | None
    """Width that the routed experts read and write (K3); None: the hidden size (Kimi Linear)."""
    latent_norm: bool
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense: int = 1
    layer_freq: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: Literal["kimi_k3", "kimi_linear"]
    """The file layout: K3 nests the text model and prefixes its tensors with `language_model.`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    """Zero-based; every other layer is KDA."""
    intermediate_size: int
    activation: Literal["situ", "silu"]
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    attn_res_block_size: int | None = None
    """Decoder layers in a block of Attention Residuals; None: the plain residual stream."""
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Storage of the linear and norm weights in the files; computing may use another."""
    experts_mxfp4: bool = False
    """Routed experts are stored as MXFP4."""
    has_vision: bool = False
    ignored_keys: tuple[str, ...] = ()
    """Keys of the file that are known and change nothing in the text model."""

    def __post_init__(self) -> None:
        _check_sizes(self, "vocab_size hidden_size num_layers intermediate_size", 1)
        _check_sizes(self, "max_position_embeddings attn_res_block_size", 1)
        _check_sizes(self.kda, "num_heads head_dim conv_width", 1)
        _check_sizes(self.mla, "num_heads q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim", 1)
        _check_sizes(self.mla, "qk_rope_head_dim", 0)
        for name in ("rms_norm_eps", "situ_beta", "situ_linear_beta", "initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, not {value}")
        bad = [i for i in self.mla_layers if not 0 <= i < self.num_layers]
        if bad:
            raise ConfigError(f"full_attn_layers names layers outside 1..{self.num_layers}: {bad}")
        if self.moe is not None:
            self._check_moe(self.moe)

    def _check_moe(self, moe: MoEConfig) -> None:
        _check_sizes(moe, "num_experts num_experts_per_token intermediate_size latent_size", 1)
        _check_sizes(moe, "num_shared_experts first_k_dense", 0)
        _check_sizes(moe, "layer_freq", 1)
        if not 0 < moe.routed_scaling_factor < math.inf:
            raise ConfigError("routed_scaling_factor must be positive and finite")
        if moe.num_experts_per_token > moe.num_experts:
            raise ConfigError("num_experts_per_token exceeds num_experts")
        width = moe.latent_size or self.hidden_size
        if self.experts_mxfp4 and (width % 32 or moe.intermediate_size % 32):
            raise ConfigError(
                "MXFP4 experts need widths in multiples of 32, not "
                f"{width} (read by the experts) and {moe.intermediate_size} (moe_intermediate_size)"
            )

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        moe = self.moe
        return moe is not None and layer >= moe.first_k_dense and layer % moe.layer_freq == 0

    @property
    def eos_ids(self) -> frozenset[int]:
        if self.eos_token_id is None:
            return frozenset()
        ids = self.eos_token_id
        return frozenset(ids if isinstance(ids, tuple) else (ids,))


def _check_sizes(part: object, names: str, least: int) -> None:
    for name in names.split():
        value = getattr(part, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
