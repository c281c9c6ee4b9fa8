"""A `ModelConfig` as the `config.json` of its family: the inverse of `parse_config`."""

from __future__ import annotations

from typing import Any

from perilune.model.config import ModelConfig, MoEConfig
from perilune.model.presets import MOONVIT, MXFP4_QUANTIZATION

ARCHITECTURES = {
    "kimi_k3": ["KimiK3ForConditionalGeneration"],
    "kimi_linear": ["KimiLinearForCausalLM"],
}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The JSON object that parses to `config` (but for `ignored_keys`)."""
    eos = config.eos_token_id
    outer: dict[str, Any] = {
        "architectures": ARCHITECTURES[config.family],
        "model_type": config.family,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.experts_mxfp4:
        outer["quantization_config"] = MXFP4_QUANTIZATION
    text = _text(config)
    if config.family == "kimi_linear":
        return {**outer, **text}
    outer["text_config"] = {"model_type": "kimi_linear", **text}
    if config.has_vision:
        outer["vision_config"] = MOONVIT
    return outer


def _text(config: ModelConfig) -> dict[str, Any]:
    situ = {
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
    }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.activation,
        **(situ if config.activation == "situ" else {}),
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "attn_res_block_size": config.attn_res_block_size,
        "linear_attn_config": _linear_attn(config),
        **_mla(config),
        **(_moe(config.moe) if config.moe is not None else {}),
    }


def _linear_attn(config: ModelConfig) -> dict[str, Any]:
    kda, layers = config.kda, range(config.num_layers)
    values: dict[str, Any] = {
        "full_attn_layers": [i + 1 for i in layers if config.is_mla(i)],
        "kda_layers": [i + 1 for i in layers if not config.is_mla(i)],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_width,
        "use_full_rank_gate": kda.full_rank_gate,
    }
    if kda.gate_lower_bound is not None:
        values["gate_lower_bound"] = kda.gate_lower_bound
    return values


def _mla(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    return {
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": mla.output_gate,
    }


def _moe(moe: MoEConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "routed_expert_hidden_size": moe.latent_size,
        "latent_moe_use_norm": moe.latent_norm,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": moe.first_k_dense,
        "moe_layer_freq": moe.layer_freq,
    }
