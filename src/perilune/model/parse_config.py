"""`config.json` of either family to `ModelConfig`: every key is used, ignored by name, or refused.

Layer numbers count from one in the files and from zero in `ModelConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

from perilune.core.errors import ConfigError, UnsupportedError
from perilune.model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from perilune.model.known_keys import FIXED_KEYS, IGNORED_KEYS, Fixed, derived_keys


class _Keys:
    """Hands out the keys of one JSON object and remembers which were asked for."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where, self.seen = values, where, set[str]()

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        self.seen.add(key)
        value = self.values.get(key, default)
        if value is ...:
            raise ConfigError(f"{self.where}: the key '{key}' is missing")
        if value is default:
            return value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int:
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self.where}: '{key}' must be {expected}, not {value!r}")
        return value

    def rest(self, fixed: Fixed, ignored: frozenset[str] = IGNORED_KEYS) -> tuple[str, ...]:
        """Keys not taken; raises for one that is not known, or asks for what is not computed."""
        left = [key for key in self.values if key not in self.seen]
        unknown = sorted(set(left) - fixed.keys() - ignored)
        if unknown:
            raise ConfigError(f"{self.where}: unknown keys: {', '.join(unknown)}")
        for key in left:
            value, allowed = self.values[key], fixed.get(key)
            if value is None or allowed is None:
                continue
            if not any(type(value) is type(a) and value == a for a in allowed):
                must = " or ".join(map(short, allowed)) or "null"
                raise UnsupportedError(f"{self.where}: '{key}' must be {must}, not {short(value)}")
        return tuple(left)


_NONE = type(None)


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Builds a `ModelConfig` from the JSON object of either family.

    Raises:
        ConfigError: a missing, unknown, mistyped or inconsistent key, named with its file.
        UnsupportedError: a valid option that no released model uses (rotated MLA, expert groups).
    """
    model_type = raw.get("model_type")
    if model_type == "kimi_k3":
        return _parse_k3(raw, where)
    if model_type == "kimi_linear":
        return _parse_text(raw, where, family="kimi_linear")
    raise ConfigError(f"{where}: model_type must be kimi_k3 or kimi_linear, not {model_type!r}")


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `config.json` in `directory`."""
    path = Path(directory) / "config.json"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device has no end
            raise ConfigError(f"{path} cannot be read: not a regular file")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return parse_config(raw, str(path))


def _parse_k3(raw: Mapping[str, Any], where: str) -> ModelConfig:
    keys = _Keys(raw, where)
    keys.take("model_type", str)
    text = dict(keys.take("text_config", dict))
    vision = keys.take("vision_config", (dict, _NONE), None)
    quantization = keys.take("quantization_config", (dict, _NONE), None)
    outer = "bos_token_id eos_token_id pad_token_id tie_word_embeddings dtype torch_dtype"
    for key in outer.split():
        if key in raw:
            text.setdefault(key, keys.take(key, (object, bool)))
    ignored = keys.rest(FIXED_KEYS)
    return _parse_text(
        text,
        f"{where}: text_config",
        family="kimi_k3",
        quantization=quantization,
        has_vision=vision is not None,
        outer_ignored=ignored,
    )


def _parse_text(
    raw: Mapping[str, Any],
    where: str,
    *,
    family: Literal["kimi_k3", "kimi_linear"],
    quantization: Mapping[str, Any] | None = None,
    has_vision: bool = False,
    outer_ignored: tuple[str, ...] = (),
) -> ModelConfig:
    keys = _Keys(raw, where)
    quantization = keys.take("quantization_config", (dict, _NONE), None) or quantization
    num_layers = keys.take("num_hidden_layers", int)
    kda, mla_layers = _parse_linear_attn(keys, num_layers)
    act = keys.take("hidden_act", str)
    if act not in ("situ", "silu"):
        raise UnsupportedError(f"{where}: hidden_act must be situ or silu, not {act!r}")
    if keys.take("num_nextn_predict_layers", (int, _NONE), 0):
        raise UnsupportedError(
            f"{where}: num_nextn_predict_layers > 0 (no release has MTP tensors)"
        )
    positions = keys.take("max_position_embeddings", int, None)
    positions = keys.take("model_max_length", int, None) or positions or 1048576
    values: dict[str, Any] = {
        "vocab_size": keys.take("vocab_size", int),
        "hidden_size": keys.take("hidden_size", int),
        "intermediate_size": keys.take("intermediate_size", int),
        "rms_norm_eps": keys.take("rms_norm_eps", float),
        "attn_res_block_size": keys.take("attn_res_block_size", (int, _NONE), None),
        "tie_word_embeddings": keys.take("tie_word_embeddings", bool, False),
        "initializer_range": keys.take("initializer_range", float, 0.02),
        "bos_token_id": keys.take("bos_token_id", (int, _NONE), None),
        "pad_token_id": keys.take("pad_token_id", (int, _NONE), None),
    }
    if act == "situ":
        values["situ_beta"] = keys.take("activation_situ_beta", float)
        values["situ_linear_beta"] = keys.take("activation_situ_linear_beta", (float, _NONE), None)
    else:
        keys.take("activation_situ_beta", (float, _NONE), None)
        keys.take("activation_situ_linear_beta", (float, _NONE), None)
    config = ModelConfig(
        family=family,
        num_layers=num_layers,
        mla_layers=mla_layers,
        activation="situ" if act == "situ" else "silu",
        eos_token_id=_parse_eos(keys),
        max_position_embeddings=positions,
        kda=kda,
        mla=_parse_mla(keys),
        moe=_parse_moe(keys),
        dtype=_parse_dtype(keys),
        experts_mxfp4=_is_mxfp4(quantization, where),
        has_vision=has_vision,
        **values,
    )
    known = keys.rest(FIXED_KEYS | derived_keys(config))
    return replace(config, ignored_keys=(*outer_ignored, *known))


def _parse_eos(keys: _Keys) -> int | tuple[int, ...] | None:
    eos = keys.take("eos_token_id", (int, list, _NONE), None)
    if not isinstance(eos, list):
        return eos
    if any(type(token) is not int for token in eos):
        raise ConfigError(f"{keys.where}: 'eos_token_id' must hold integers, not {eos!r}")
    return tuple(eos)


def _parse_dtype(keys: _Keys) -> Literal["bfloat16", "float16", "float32"]:
    old = keys.take("torch_dtype", (str, _NONE), None)
    dtype = keys.take("dtype", (str, _NONE), None) or old or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UnsupportedError(
            f"{keys.where}: dtype must be bfloat16, float16 or float32, not {dtype!r}"
        )
    return dtype


def _parse_linear_attn(keys: _Keys, num_layers: int) -> tuple[KDAConfig, tuple[int, ...]]:
    sub = _Keys(keys.take("linear_attn_config", dict), f"{keys.where}: linear_attn_config")
    full = sub.take("full_attn_layers", list)
    linear = sub.take("kda_layers", list)
    both = [*full, *linear]
    whole = len(both) == num_layers and all(type(layer) is int for layer in both)
    if not whole or sorted(both) != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{sub.where}: full_attn_layers and kda_layers must name each of 1..{num_layers} once"
        )
    kda = KDAConfig(
        num_heads=sub.take("num_heads", int),
        head_dim=sub.take("head_dim", int),
        conv_width=sub.take("short_conv_kernel_size", int, 4),
        gate_lower_bound=sub.take("gate_lower_bound", (float, _NONE), None),
        full_rank_gate=sub.take("use_full_rank_gate", bool, False),
    )
    sub.rest({}, ignored=frozenset())
    return kda, tuple(sorted(layer - 1 for layer in full))


def _parse_mla(keys: _Keys) -> MLAConfig:
    if not keys.take("mla_use_nope", bool, True):
        raise UnsupportedError(f"{keys.where}: mla_use_nope false (rotated MLA) is in no release")
    heads = keys.take("num_attention_heads", int)
    if keys.take("num_key_value_heads", (int, _NONE), None) not in (None, heads):
        raise UnsupportedError(f"{keys.where}: num_key_value_heads must equal num_attention_heads")
    nope, rope = keys.take("qk_nope_head_dim", int), keys.take("qk_rope_head_dim", int)
    if keys.take("qk_head_dim", (int, _NONE), None) not in (None, nope + rope):
        raise ConfigError(f"{keys.where}: qk_head_dim is not qk_nope_head_dim + qk_rope_head_dim")
    return MLAConfig(
        num_heads=heads,
        q_lora_rank=keys.take("q_lora_rank", (int, _NONE), None),
        kv_lora_rank=keys.take("kv_lora_rank", int),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.take("v_head_dim", int),
        output_gate=keys.take("mla_use_output_gate", bool, False),
    )


def _parse_moe(keys: _Keys) -> MoEConfig | None:
    num_experts = keys.take("num_experts", (int, _NONE), None)
    per_token = keys.take("num_experts_per_token", (int, _NONE), None)
    shared = keys.take("num_shared_experts", (int, _NONE), None)
    width = keys.take("moe_intermediate_size", (int, _NONE), None)
    rest = {
        "latent_size": keys.take("routed_expert_hidden_size", (int, _NONE), None),
        "latent_norm": keys.take("latent_moe_use_norm", bool, False),
        "renormalize": keys.take("moe_renormalize", bool, True),
        "routed_scaling_factor": keys.take("routed_scaling_factor", float, 1.0),
        "first_k_dense": keys.take("first_k_dense_replace", int, 0),
        "layer_freq": keys.take("moe_layer_freq", int, 1),
    }
    if not num_experts:
        return None
    if per_token is None or width is None:
        raise ConfigError(
            f"{keys.where}: num_experts needs num_experts_per_token and moe_intermediate_size"
        )
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        num_shared_experts=shared or 0,
        intermediate_size=width,
        **rest,
    )


def _is_mxfp4(quantization: Mapping[str, Any] | None, where: str) -> bool:
    if not quantization:
        return False
    scheme = quantization.get("format")
    if scheme != "mxfp4-pack-quantized":
        raise UnsupportedError(
            f"{where}: quantization format {scheme!r}; only mxfp4-pack-quantized"
        )
    return True
