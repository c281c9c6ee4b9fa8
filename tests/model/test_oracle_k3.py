"""Kimi K3 against mlx-lm's independent implementation, whole models at random tiny sizes."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models import kimi_k3

from perilune.model.presets import tiny_k3

mx.disable_compile()  # on a CPU it would call a C++ compiler for every fused expression

TOKENS = 45
PIECES = [7, 26] + [1] * 12
"""An odd cut, one across a chunk of the recurrence, then decoding."""
BOUND = 3e-4
"""Of max |logit|. Right implementations differ by 1e-5 to 1e-4 in models that small."""

NUM_CONFIGS = 14
TEXT_OPTIONS: dict[str, list[Any]] = {
    "vocab_size": [97, 128],
    "hidden_size": [33, 64, 52],
    "intermediate_size": [37, 96],
    "num_hidden_layers": [4, 5, 3, 6],
    "rms_norm_eps": [1e-5, 1e-4],
    "attn_res_block_size": [2, None, 1, 3],
    "activation_situ_beta": [4.0, 1.7],
    "activation_situ_linear_beta": [25.0, None, 3.0],
    "num_attention_heads": [3, 4, 1],
    "q_lora_rank": [11, None],
    "kv_lora_rank": [7, 16],
    "qk_nope_head_dim": [5, 16],
    "qk_rope_head_dim": [3, 8],
    "v_head_dim": [6, 16],
    "mla_use_output_gate": [True, False],
    "num_experts": [8, 5, 3],
    "num_experts_per_token": [2, 3],
    "num_shared_experts": [2, 0, 1],
    "moe_intermediate_size": [13, 40],
    "moe_renormalize": [True, False],
    "routed_scaling_factor": [1.0, 2.446],
    "first_k_dense_replace": [1, 0, 2],
    "moe_layer_freq": [1, 2],
    "tie_word_embeddings": [False, True],
}
LATENTS = [(32, True), (17, True), (17, False), (None, False)]
"""`routed_expert_hidden_size`, `latent_moe_use_norm`."""
KDA_OPTIONS: dict[str, list[Any]] = {
    "num_heads": [3, 4, 1],
    "head_dim": [8, 32, 10],
    "short_conv_kernel_size": [4, 3, 2],
    "use_full_rank_gate": [True, False],
    "gate_lower_bound": [-5.0, None, -1.5],
}
PATTERNS = ["KKKM", "KM", "MK", "KKM", "K", "M"]
"""Layer kinds, repeated over the depth."""


def configs() -> list[dict[str, Any]]:
    """Random mixes in which every value of every option occurs."""
    rng = random.Random(5)

    def column(values: list[Any]) -> list[Any]:
        repeated = (values * NUM_CONFIGS)[:NUM_CONFIGS]
        return rng.sample(repeated, NUM_CONFIGS)

    text = {name: column(values) for name, values in TEXT_OPTIONS.items()}
    linear = {name: column(values) for name, values in KDA_OPTIONS.items()}
    latents, patterns = column(LATENTS), column(PATTERNS)
    made = []
    for i in range(NUM_CONFIGS):
        values = {name: options[i] for name, options in text.items()}
        kinds = (patterns[i] * 6)[: values["num_hidden_layers"]]
        attention = {name: options[i] for name, options in linear.items()}
        attention["full_attn_layers"] = [n for n, kind in enumerate(kinds, 1) if kind == "M"]
        attention["kda_layers"] = [n for n, kind in enumerate(kinds, 1) if kind == "K"]
        size, norm = latents[i]
        values |= {"routed_expert_hidden_size": size, "latent_moe_use_norm": norm}
        made.append(tiny_k3(linear_attn=attention, **values))
    return made


EDGES = {
    "release_like": tiny_k3(),
    "all_dense": tiny_k3(num_experts=None),
    # The oracle leaves a single choice as it is where the release divides it by itself.
    "one_active_expert": tiny_k3(num_experts_per_token=1, moe_renormalize=False),
    "every_expert_active": tiny_k3(num_experts=3, num_experts_per_token=3),
}
CASES = [pytest.param(raw, id=name) for name, raw in EDGES.items()]
CASES += [pytest.param(raw, id=f"random{i}") for i, raw in enumerate(configs())]


def oracle(raw: dict[str, Any], weights: dict[str, np.ndarray]) -> kimi_k3.Model:
    """A fresh model: in evaluation mode it keeps products of its first weights for good."""
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(raw))
    named = {f"language_model.{name}": mx.array(value) for name, value in weights.items()}
    model.load_weights(list(model.sanitize(named).items()), strict=True)
    model.eval()
    return model


def checkpoint_names(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """One array an expert and projection, as released."""
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        head, _, last = name.rpartition(".")
        if last == "w13":
            for e, rows in enumerate(tensor.numpy()):
                arrays[f"{head}.{e}.w1.weight"], arrays[f"{head}.{e}.w3.weight"] = np.split(rows, 2)
        elif last == "w2":
            for e, rows in enumerate(tensor.numpy()):
                arrays[f"{head}.{e}.w2.weight"] = rows
        else:
            arrays[name] = tensor.numpy()
    return arrays


@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16_weights"])
@pytest.mark.parametrize("raw", CASES)
def test_logits_equal_the_oracle(raw, rounded, draw, in_pieces, spread):
    drawn = draw(raw, TOKENS, seed=3, rounded=rounded)
    model = oracle(raw, checkpoint_names(drawn.model.state_dict()))
    ids = mx.array(drawn.ids_T.numpy()[None])
    want = np.array(model(ids))[0]
    assert spread(drawn.logits_TV.numpy(), want) < BOUND

    cache, steps, start = model.make_cache(), [], 0
    for length in [33] + [1] * 12:
        steps.append(np.array(model(ids[:, start : start + length], cache=cache))[0])
        start += length
    pieces = in_pieces(drawn, PIECES)
    assert spread(pieces, np.concatenate(steps)) < BOUND
    assert spread(pieces, want) < BOUND


@pytest.mark.parametrize(
    "change",
    [
        {"activation_situ_linear_beta": None},
        {"moe_renormalize": False},
        {"routed_scaling_factor": 1.02},
        {"attn_res_block_size": 3},
        {"linear_attn": {"gate_lower_bound": -4.9}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_sees_a_changed_option(change, draw, spread):
    # Without the latent norm, which would hide a common factor of the routing weights.
    drawn = draw(tiny_k3(latent_moe_use_norm=False), TOKENS, seed=3, gain=1.5)
    changed = tiny_k3(latent_moe_use_norm=False, **change)
    model = oracle(changed, checkpoint_names(drawn.model.state_dict()))
    want = np.array(model(mx.array(drawn.ids_T.numpy()[None])))[0]
    assert spread(drawn.logits_TV.numpy(), want) > BOUND
