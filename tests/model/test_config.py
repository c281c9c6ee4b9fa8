"""`config.json` of both families: what parses, what is refused, and the way back."""

import contextlib
import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, PeriluneError, UnsupportedError
from perilune.model.config_json import config_json
from perilune.model.parse_config import load_config, parse_config
from perilune.model.presets import PRESETS, kimi_k3, preset, tiny_k3, tiny_kimi_linear

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 9), st.none(), st.text(max_size=2)), max_size=7),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def test_k3_layers_are_three_to_one_with_two_mla_at_the_end():
    config = preset("kimi-k3")
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert config.num_layers - len(config.mla_layers) == 69
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]
    assert config.has_vision
    assert config.experts_mxfp4


def test_kimi_linear_has_none_of_the_k3_options():
    config = preset("kimi-linear-48b-a3b")
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert config.mla.q_lora_rank is None
    assert not config.mla.output_gate
    assert config.attn_res_block_size is None
    assert config.moe is not None
    assert config.moe.latent_size is None
    assert config.max_position_embeddings == 1048576


def test_nano_ids_are_the_reserved_tail_of_its_vocabulary():
    config = preset("nano")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5888, 5890, 6143)
    assert config.vocab_size == 5888 + 256


@pytest.mark.parametrize("name", PRESETS)
def test_written_config_parses_to_the_same_value(name):
    config = preset(name)
    raw = json.loads(json.dumps(config_json(config)))
    assert replace(parse_config(raw), ignored_keys=()) == replace(config, ignored_keys=())


@pytest.mark.parametrize(
    "raw",
    [
        tiny_k3(mxfp4=True, dtype="float32", tie_word_embeddings=True, attn_res_block_size=None),
        tiny_k3(eos_token_id=[2, 5], routed_expert_hidden_size=None, latent_moe_use_norm=False),
        tiny_k3(num_experts=None, q_lora_rank=None, mla_use_output_gate=False, hidden_act="silu"),
        tiny_k3(activation_situ_linear_beta=None, num_shared_experts=0, moe_renormalize=False),
        tiny_kimi_linear(linear_attn={"use_full_rank_gate": True, "gate_lower_bound": -2.0}),
    ],
)
def test_written_options_parse_to_the_same_value(raw):
    config = parse_config(raw)
    again = parse_config(json.loads(json.dumps(config_json(config))))
    assert replace(again, ignored_keys=()) == replace(config, ignored_keys=())


def test_known_keys_without_effect_are_listed():
    config = parse_config(tiny_kimi_linear(head_dim=72, rope_theta=10000.0))
    assert {"head_dim", "rope_theta"} <= set(config.ignored_keys)


def test_keys_that_say_what_is_computed_are_known():
    sixth = ["linear_attention"] * 3 + ["full_attention", "linear_attention", "full_attention"]
    said = {
        "topk_method": "noaux_tc",
        "use_grouped_topk": False,
        "attention_bias": False,
        "layer_types": sixth,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": None,
    }
    raw = tiny_k3()
    config = parse_config(raw)
    raw["text_config"].update(said)
    again = parse_config(raw)
    assert said.keys() <= set(again.ignored_keys)
    assert replace(again, ignored_keys=()) == replace(config, ignored_keys=())


@pytest.mark.parametrize("bound", [-5.1, 0.0, 1.0, float("nan"), float("-inf")])
def test_a_gate_bound_out_of_range_is_refused_however_it_is_made(bound):
    with pytest.raises(UnsupportedError, match="gate_lower_bound must lie in"):
        replace(preset("nano").kda, gate_lower_bound=bound)
    with pytest.raises(UnsupportedError, match="gate_lower_bound must lie in"):
        parse_config(tiny_k3(linear_attn={"gate_lower_bound": bound}))


def test_outer_ids_and_dtype_reach_the_text_model():
    config = parse_config(tiny_k3(dtype="float16"))
    assert (config.bos_token_id, config.eos_ids, config.dtype) == (1, frozenset({2}), "float16")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hiden_size": 64}, ConfigError, "unknown keys: hiden_size"),
        ({"hidden_size": "64"}, ConfigError, "'hidden_size' must be int"),
        ({"hidden_size": True}, ConfigError, "'hidden_size' must be int"),
        ({"hidden_size": 0}, ConfigError, "hidden_size must be at least 1"),
        ({"kv_lora_rank": -1}, ConfigError, "kv_lora_rank must be at least 1"),
        ({"qk_head_dim": 25}, ConfigError, "qk_head_dim is not"),
        ({"moe_layer_freq": 0}, ConfigError, "layer_freq must be at least 1"),
        ({"num_experts_per_token": 9}, ConfigError, "exceeds num_experts"),
        ({"num_experts_per_token": 0}, ConfigError, "num_experts_per_token must be at least 1"),
        ({"moe_intermediate_size": None}, ConfigError, "needs num_experts_per_token and"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps must be positive"),
        ({"eos_token_id": [1, "a"]}, ConfigError, "'eos_token_id' must hold integers"),
        ({"num_hidden_layers": 10**12}, ConfigError, "must name each of"),
        ({"mla_use_nope": False}, UnsupportedError, "rotated MLA"),
        ({"num_expert_group": 2}, UnsupportedError, "'num_expert_group' must be 1, not 2"),
        ({"hidden_act": "relu"}, UnsupportedError, "hidden_act must be situ or silu"),
        ({"num_key_value_heads": 2}, UnsupportedError, "num_key_value_heads must equal"),
        ({"num_nextn_predict_layers": 1}, UnsupportedError, "num_nextn_predict_layers"),
        ({"dtype": "int8"}, UnsupportedError, "dtype must be bfloat16"),
        ({"quantization_config": {"format": "int4"}}, UnsupportedError, "only mxfp4"),
        ({"model_type": "llama"}, UnsupportedError, "'model_type' must be 'kimi_linear', not"),
        ({"topk_method": "greedy"}, UnsupportedError, "'topk_method' must be 'noaux_tc', not"),
        ({"use_grouped_topk": 2}, UnsupportedError, "'use_grouped_topk' must be True or False"),
        ({"moe_router_activation_func": "softmax"}, UnsupportedError, "'sigmoid', not 'softmax'"),
        ({"attention_bias": True}, UnsupportedError, "'attention_bias' must be False, not True"),
        ({"kv_cache_scheme": {"type": "fp8"}}, UnsupportedError, "'kv_cache_scheme' must be null"),
        ({"layer_types": ["full_attention"] * 6}, UnsupportedError, "'layer_types' must be"),
        ({"mlp_layer_types": ["sparse"] * 6}, UnsupportedError, "'mlp_layer_types' must be"),
        ({"linear_head_dim": 33}, UnsupportedError, "'linear_head_dim' must be 32, not 33"),
        ({"linear_num_heads": 9}, UnsupportedError, "'linear_num_heads' must be 4, not 9"),
        ({"linear_conv_kernel_dim": 5}, UnsupportedError, "'linear_conv_kernel_dim' must be 4"),
    ],
)
def test_a_wrong_key_is_named(change, error, message):
    raw = tiny_k3()
    raw["text_config"].update(change)
    with pytest.raises(error, match=message):
        parse_config(raw)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "linear_attn_config"])
def test_a_missing_key_is_named(key):
    raw = tiny_k3()
    del raw["text_config"][key]
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        parse_config(raw)


@pytest.mark.parametrize("layers", [[4], [4, 7], [4, 4, 6], ["4", 6], [4.0, 6], [None, 6]])
def test_layer_lists_must_cover_each_layer_once(layers):
    with pytest.raises(ConfigError, match="name each of"):
        parse_config(tiny_k3(linear_attn={"full_attn_layers": layers, "kda_layers": [1, 2, 3, 5]}))


def test_mxfp4_needs_whole_groups():
    with pytest.raises(ConfigError, match="multiples of 32"):
        parse_config(tiny_k3(mxfp4=True, moe_intermediate_size=40))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"a": \x00}', "9" * 5000, "[" * 100_000, "\ud800"]
)
def test_a_broken_file_is_a_config_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_file_or_directory_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@given(data=st.data())
def test_any_value_at_any_key_is_accepted_or_refused_by_name(data):
    raw = copy.deepcopy(data.draw(st.sampled_from([kimi_k3(), tiny_k3(), tiny_kimi_linear()])))
    places = [raw, raw.get("text_config", raw)]
    places.append(places[-1]["linear_attn_config"])
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JUNK)
    with contextlib.suppress(PeriluneError):  # whatever else is raised fails the test
        parse_config(raw)
