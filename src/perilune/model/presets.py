"""Configurations by name, each in the shape of its family's `config.json`.

Released sizes are facts of the published configurations; `nano` is the model in this repository;
the tiny ones are for tests and take any option as a keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perilune.core.errors import ConfigError
from perilune.model.config import ModelConfig
from perilune.model.parse_config import parse_config

MXFP4_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "zp_dtype": None,
                "actorder": None,
                "block_structure": None,
            },
        }
    },
    # Only routed experts are quantised; the released list leaves out the last two patterns,
    # although those tensors are bf16 in the release too.
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
        "re:.*_res_proj.*",
        "re:.*routed_expert_(down|up)_proj.*",
    ],
}

MOONVIT: dict[str, Any] = {
    "patch_size": 14,
    "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 1024,
    "text_hidden_size": 7168,
}


def kimi_k3() -> dict[str, Any]:
    """Kimi K3: 2.78 T parameters, 104.2 B activated."""
    mla = [*range(4, 93, 4), 93]  # counts from one; the last two layers are both MLA
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "intermediate_size": 33792,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "kda_layers": [layer for layer in range(1, 94) if layer not in mla],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    return _k3(text, ids=(163584, 163586, 163839), mxfp4=True, vision=MOONVIT)


def kimi_linear_48b_a3b() -> dict[str, Any]:
    """Kimi-Linear-48B-A3B: 49.1 B parameters, 3.1 B activated."""
    mla = [4, 8, 12, 16, 20, 24, 27]
    return {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "intermediate_size": 9216,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "model_max_length": 1048576,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "kda_layers": [layer for layer in range(1, 28) if layer not in mla],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }


def nano() -> dict[str, Any]:
    """The bundled model: every part of K3, small enough for a laptop."""
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 6144,
        "hidden_size": 320,
        "num_hidden_layers": 8,
        "intermediate_size": 960,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "num_heads": 5,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": 160,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 160,
        "routed_expert_hidden_size": 160,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
    }
    special = 5888  # the 256 reserved ids follow the ranked tokens, as in K3's vocabulary
    return _k3(text, ids=(special, special + 2, special + 255), mxfp4=True)


def tiny_k3(
    *,
    mxfp4: bool = False,
    dtype: str = "bfloat16",
    linear_attn: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **text: Any,
) -> dict[str, Any]:
    """A K3 of about 0.2 M parameters.

    Any key of `text_config` can be given; `linear_attn` overrides keys of `linear_attn_config`.
    """
    values: dict[str, Any] = {
        "model_type": "kimi_linear",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64 if mxfp4 else 40,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        **text,
    }
    values["linear_attn_config"] = {
        **_layers(values["num_hidden_layers"]),
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        **(linear_attn or {}),
    }
    return _k3(values, ids=(1, 2, 0), mxfp4=mxfp4, dtype=dtype, vision=vision)


def tiny_kimi_linear(
    *, dtype: str = "bfloat16", linear_attn: dict[str, Any] | None = None, **text: Any
) -> dict[str, Any]:
    """A Kimi Linear of about 0.2 M parameters; keywords as in `tiny_k3`."""
    values: dict[str, Any] = {
        "model_type": "kimi_linear",
        "dtype": dtype,
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "model_max_length": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        **text,
    }
    values["linear_attn_config"] = {
        **_layers(values["num_hidden_layers"]),
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        **(linear_attn or {}),
    }
    return values


def _k3(
    text: dict[str, Any],
    *,
    ids: tuple[int, int, int],
    mxfp4: bool,
    dtype: str = "bfloat16",
    vision: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Nests `text` as K3's `config.json` does; `ids` are bos, eos and pad."""
    outer: dict[str, Any] = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": dtype,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True)),
        "text_config": text,
    }
    if mxfp4:
        outer["quantization_config"] = MXFP4_QUANTIZATION
    if vision is not None:
        outer["vision_config"] = vision
    return outer


def _layers(num_layers: int) -> dict[str, list[int]]:
    """Three KDA to one MLA, counted from one; the released stacks end in MLA."""
    mla = [i for i in range(1, num_layers + 1) if i % 4 == 0 or i == num_layers]
    return {
        "full_attn_layers": mla,
        "kda_layers": [i for i in range(1, num_layers + 1) if i not in mla],
    }


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    "kimi-k3": kimi_k3,
    "kimi-linear-48b-a3b": kimi_linear_48b_a3b,
    "nano": nano,
    "tiny-k3": tiny_k3,
    "tiny-kimi-linear": tiny_kimi_linear,
}


def preset(name: str) -> ModelConfig:
    """The parsed configuration called `name`.

    Raises:
        ConfigError: no preset has that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(PRESETS)}")
    return parse_config(PRESETS[name](), name)
