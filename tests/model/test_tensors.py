"""The released layouts, name by name, and their totals."""

from collections import Counter

import pytest
import torch

from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import nano, preset, tiny_k3, tiny_kimi_linear
from perilune.model.tensors import VISION_NAME, dense_tensors, text_tensors, vision_tensors

K3 = {
    "model.embed_tokens.weight": ((163840, 7168), "BF16"),
    "lm_head.weight": ((163840, 7168), "BF16"),
    "model.norm.weight": ((7168,), "BF16"),
    "model.output_attn_res_norm.weight": ((7168,), "BF16"),
    "model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
    "model.layers.0.input_layernorm.weight": ((7168,), "BF16"),
    "model.layers.0.self_attention_res_proj.weight": ((1, 7168), "BF16"),
    "model.layers.92.mlp_res_norm.weight": ((7168,), "BF16"),
    "model.layers.0.mlp.down_proj.weight": ((7168, 33792), "BF16"),
    "model.layers.0.self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
    "model.layers.0.self_attn.A_log": ((128,), "F32"),
    "model.layers.0.self_attn.dt_bias": ((12288,), "F32"),
    "model.layers.0.self_attn.f_a_proj.weight": ((128, 7168), "BF16"),
    "model.layers.0.self_attn.f_b_proj.weight": ((12288, 128), "BF16"),
    "model.layers.0.self_attn.b_proj.weight": ((96, 7168), "BF16"),
    "model.layers.0.self_attn.o_norm.weight": ((128,), "F32"),
    "model.layers.0.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
    "model.layers.92.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
    "model.layers.92.self_attn.q_b_proj.weight": ((18432, 1536), "BF16"),
    "model.layers.92.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
    "model.layers.92.self_attn.kv_a_layernorm.weight": ((512,), "BF16"),
    "model.layers.92.self_attn.kv_b_proj.weight": ((24576, 512), "BF16"),
    "model.layers.1.block_sparse_moe.gate.weight": ((896, 7168), "BF16"),
    "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
    "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight": ((3584, 7168), "BF16"),
    "model.layers.1.block_sparse_moe.routed_expert_norm.weight": ((3584,), "BF16"),
    "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight": ((6144, 7168), "BF16"),
    "model.layers.92.block_sparse_moe.experts.895.w3.weight_packed": ((3072, 1792), "U8"),
    "model.layers.92.block_sparse_moe.experts.895.w3.weight_scale": ((3072, 112), "U8"),
    "model.layers.92.block_sparse_moe.experts.0.w2.weight_packed": ((3584, 1536), "U8"),
    "model.layers.92.block_sparse_moe.experts.0.w2.weight_scale": ((3584, 96), "U8"),
}
KIMI_LINEAR = {
    "model.layers.0.self_attn.A_log": (1, 1, 32, 1),
    "model.layers.0.self_attn.g_a_proj.weight": (128, 2304),
    "model.layers.0.self_attn.g_b_proj.weight": (4096, 128),
    "model.layers.26.self_attn.q_proj.weight": (6144, 2304),
    "model.layers.26.self_attn.kv_b_proj.weight": (8192, 512),
    "model.layers.0.mlp.gate_proj.weight": (9216, 2304),
    "model.layers.26.block_sparse_moe.experts.255.w2.weight": (2304, 1024),
    "model.layers.26.block_sparse_moe.shared_experts.gate_proj.weight": (1024, 2304),
}


def test_k3_totals_are_the_published_ones():
    config = preset("kimi-k3")
    tensors = elements = size = 0
    for spec in text_tensors(config):
        tensors, elements, size = tensors + 1, elements + spec.num_elements, size + spec.num_bytes
    for spec in vision_tensors(config):
        assert VISION_NAME.match(spec.name)
        tensors, elements, size = tensors + 1, elements + spec.num_elements, size + spec.num_bytes
    assert (tensors, elements, size) == (497_220, 1_503_647_073_024, 1_560_860_324_864)


def test_k3_names_shapes_and_dtypes():
    wanted = {f"language_model.{name}" for name in K3}
    found = {s.name: s for s in text_tensors(preset("kimi-k3")) if s.name in wanted}
    for name, (shape, dtype) in K3.items():
        spec = found[f"language_model.{name}"]
        assert (spec.shape, spec.dtypes) == (shape, (dtype,)), name


def test_kimi_linear_names_and_shapes():
    found = {s.name: s.shape for s in text_tensors(preset("kimi-linear-48b-a3b"))}
    assert {name: found[name] for name in KIMI_LINEAR} == KIMI_LINEAR
    kinds = Counter(name.split("self_attn.")[1] for name in found if "self_attn." in name)
    assert kinds["A_log"] == kinds["g_b_proj.weight"] == 20
    assert kinds["q_proj.weight"] == 27  # KDA and MLA both have one
    assert kinds["kv_b_proj.weight"] == 7
    assert not any("res_proj" in name or "latent" in name for name in found)


@pytest.mark.parametrize(
    "raw",
    [
        nano(),
        tiny_k3(),
        tiny_k3(mxfp4=True, tie_word_embeddings=True),
        tiny_k3(attn_res_block_size=None, q_lora_rank=None, mla_use_output_gate=False),
        tiny_k3(routed_expert_hidden_size=None, latent_moe_use_norm=False, num_shared_experts=0),
        tiny_k3(num_experts=None, linear_attn={"use_full_rank_gate": False}),
        tiny_k3(first_k_dense_replace=0, moe_layer_freq=2, latent_moe_use_norm=False),
        tiny_kimi_linear(),
        tiny_kimi_linear(num_shared_experts=2, tie_word_embeddings=True),
    ],
)
def test_targets_are_the_state_dict_of_the_model(raw):
    config = parse_config(raw)
    with torch.device("meta"):
        state = {name: tuple(t.shape) for name, t in Transformer(config).state_dict().items()}
    names = [spec.name for spec in text_tensors(config)]
    assert len(set(names)) == len(names)
    assert {spec.target for spec in text_tensors(config)} == set(state)
    for spec in dense_tensors(config):
        wanted = (config.kda.num_heads,) if spec.kind == "a_log" else spec.shape
        assert state[spec.target] == wanted, spec


def test_expert_rows_tile_the_stacked_weights():
    config = parse_config(tiny_k3())
    rows = Counter()
    for spec in text_tensors(config):
        if spec.expert is not None:
            rows[spec.target] += spec.rows[1] - spec.rows[0]
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    assert rows
    assert rows == {name: state[name].shape[0] * state[name].shape[1] for name in rows}


def test_a_log_fits_with_any_padding_but_never_short():
    (k3,) = {
        s for s in text_tensors(parse_config(tiny_k3())) if s.name.endswith("0.self_attn.A_log")
    }
    assert k3.shape == (128,)
    assert [k3.fits((n,), 4) for n in (3, 4, 8, 128)] == [False, True, True, True]
    assert not k3.fits((1, 1, 4, 1), 4)
    specs = text_tensors(parse_config(tiny_kimi_linear()))
    (linear,) = {s for s in specs if s.name.endswith("0.self_attn.A_log")}
    assert [linear.fits(shape, 4) for shape in ((1, 1, 4, 1), (4,), (1, 1, 8, 1))] == [
        True,
        False,
        False,
    ]
