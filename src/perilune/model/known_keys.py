"""Keys of `config.json` that decide nothing here: any value, or only one that says what we do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.model.config import ModelConfig

Fixed = Mapping[str, tuple[Any, ...]]
"""The values that mean what the model computes; null always does. Any other one is refused."""

# Boilerplate of transformers and training-time keys: without effect on the text model.
IGNORED_KEYS = frozenset(
    [
        "architectures",
        "auto_map",
        "transformers_version",
        "_name_or_path",
        "use_cache",
        "attention_dropout",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "video_attn_type",
        "hidden_dropout",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "pruned_heads",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "task_specific_params",
        "problem_type",
        "id2label",
        "label2id",
        "finetuning_task",
        "tokenizer_class",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "remove_invalid_values",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "pretraining_tp",
        "output_router_logits",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "ignore_index",
        "media_placeholder_token_id",
        "image_placeholder",
        "_attn_implementation",
    ]
)

FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True, False),  # with one group of experts they are the same
    "num_expert_group": (1,),
    "topk_group": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "attention_bias": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "kv_cache_scheme": (),
}


def derived_keys(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Second names, as transformers writes them, of what other keys have said already."""
    layers, kda = range(config.num_layers), config.kda
    return {
        "model_type": ("kimi_linear",),
        "layer_types": (
            ["full_attention" if config.is_mla(i) else "linear_attention" for i in layers],
        ),
        "mlp_layer_types": (["sparse" if config.is_moe(i) else "dense" for i in layers],),
        "linear_head_dim": (kda.head_dim,),
        "linear_num_heads": (kda.num_heads,),
        "linear_conv_kernel_dim": (kda.conv_width,),
    }
