"""Kimi Linear against transformers' independent implementation, at random tiny sizes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from perilune.model.presets import tiny_kimi_linear

TOKENS = 75
"""More than a chunk of the oracle's recurrence (64)."""
PIECES = [7, 26, 32] + [1] * 10
BOUND = 3e-4
"""Of max |logit|."""

NUM_CONFIGS = 10
TEXT_OPTIONS: dict[str, list[Any]] = {
    "vocab_size": [97, 128],
    "hidden_size": [33, 64, 52],
    "intermediate_size": [37, 96],
    "num_hidden_layers": [4, 5, 3],
    "rms_norm_eps": [1e-5, 1e-4],
    "num_attention_heads": [3, 4, 1],
    "q_lora_rank": [None, 11],
    "kv_lora_rank": [7, 16],
    "qk_nope_head_dim": [5, 16],
    "qk_rope_head_dim": [3, 8],
    "v_head_dim": [6, 16],
    "num_experts": [8, 5, 3],
    "num_experts_per_token": [2, 1, 3],
    "num_shared_experts": [1, 2],
    "moe_intermediate_size": [13, 40],
    "moe_renormalize": [True, False],
    "routed_scaling_factor": [2.446, 1.0],
    "first_k_dense_replace": [1, 0, 2],
    "tie_word_embeddings": [False, True],
}
KDA_OPTIONS: dict[str, list[Any]] = {
    "num_heads": [3, 4, 1],
    "head_dim": [8, 32, 10],
    "short_conv_kernel_size": [4, 3, 2],
}
PATTERNS = ["KKM", "KM", "MK", "MKKK"]
"""Layer kinds, repeated over the depth. (The oracle's cache needs an MLA layer.)"""


def configs() -> list[dict[str, Any]]:
    """Random mixes in which every value of every option occurs."""
    rng = random.Random(11)

    def column(values: list[Any]) -> list[Any]:
        return rng.sample((values * NUM_CONFIGS)[:NUM_CONFIGS], NUM_CONFIGS)

    text = {name: column(values) for name, values in TEXT_OPTIONS.items()}
    linear = {name: column(values) for name, values in KDA_OPTIONS.items()}
    patterns = column(PATTERNS)
    made = []
    for i in range(NUM_CONFIGS):
        values = {name: options[i] for name, options in text.items()}
        kinds = (patterns[i] * 6)[: values["num_hidden_layers"]]
        attention = {name: options[i] for name, options in linear.items()}
        attention["full_attn_layers"] = [n for n, kind in enumerate(kinds, 1) if kind == "M"]
        attention["kda_layers"] = [n for n, kind in enumerate(kinds, 1) if kind == "K"]
        made.append(tiny_kimi_linear(linear_attn=attention, **values))
    return made


CASES = [pytest.param(tiny_kimi_linear(), id="release_like")]
CASES += [pytest.param(raw, id=f"random{i}") for i, raw in enumerate(configs())]


def oracle(raw: dict[str, Any], state: dict[str, torch.Tensor]) -> KimiLinearForCausalLM:
    keys = {name: value for name, value in raw.items() if name not in ("model_type", "dtype")}
    # Its grouped product wants widths in multiples of four.
    keys |= {"num_key_value_heads": raw["num_attention_heads"], "experts_implementation": "eager"}
    config = KimiLinearConfig(**keys)
    model = KimiLinearForCausalLM(config).eval().float()
    named = renamed(state)
    if raw.get("tie_word_embeddings"):
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named, strict=True)
    return model


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names that the oracle gives its tensors once a checkpoint is loaded."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("q_conv1d.weight"):
            parts = [state[name.replace("q_conv1d", f"{x}_conv1d")] for x in "qkv"]
            named[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
            continue
        if name.endswith(("k_conv1d.weight", "v_conv1d.weight")):
            continue
        name = name.replace("block_sparse_moe", "mlp")
        name = name.replace("experts.w13", "experts.gate_up_proj")
        name = name.replace("experts.w2", "experts.down_proj")
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        named[name] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
    return named


@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16_weights"])
@pytest.mark.parametrize("raw", CASES)
def test_logits_equal_the_oracle(raw, rounded, draw, in_pieces, spread):
    drawn = draw(raw, TOKENS, seed=4, rounded=rounded)
    model = oracle(raw, drawn.model.state_dict())
    ids = drawn.ids_T[None]
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[0].numpy()
        step = model(ids[:, :65], use_cache=True)
        steps = [step.logits[0].numpy()]
        for i in range(65, TOKENS):
            step = model(ids[:, i : i + 1], cache=step.cache, use_cache=True)
            steps.append(step.logits[0].numpy())
    assert spread(drawn.logits_TV.numpy(), want) < BOUND
    pieces = in_pieces(drawn, PIECES)
    assert spread(pieces, np.concatenate(steps)) < BOUND
    assert spread(pieces, want) < BOUND


@pytest.mark.parametrize(
    "change",
    [{"moe_renormalize": False}, {"routed_scaling_factor": 2.4}, {"rms_norm_eps": 1e-3}],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_sees_a_changed_option(change, draw, spread):
    drawn = draw(tiny_kimi_linear(), TOKENS, seed=4)
    model = oracle(tiny_kimi_linear(**change), drawn.model.state_dict())
    with torch.no_grad():
        want = model(drawn.ids_T[None], use_cache=False).logits[0].numpy()
    assert spread(drawn.logits_TV.numpy(), want) > BOUND
