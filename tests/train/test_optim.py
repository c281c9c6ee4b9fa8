"""Which optimiser moves what, and in which blocks."""

import pytest
import torch

from perilune.model.init import init_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.train.config import OptimConfig
from perilune.train.optim import build_optimizers


@pytest.mark.parametrize("raw", [tiny_k3(), tiny_kimi_linear()])
def test_every_parameter_has_exactly_one_optimiser(raw):
    model = init_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(0))
    muon, adam = build_optimizers(model, OptimConfig(weight_decay=0.3))
    groups = [*muon.param_groups, *adam.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}

    names = {id(p): name for name, p in model.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert "model.layers.1.block_sparse_moe.experts.w13" in by_muon
    assert "model.layers.1.block_sparse_moe.gate.weight" in by_muon
    assert not any("embed" in n or "lm_head" in n or "conv1d" in n for n in by_muon)
    undecayed = {
        names[id(p)]
        for group in adam.param_groups
        if group["weight_decay"] == 0
        for p in group["params"]
    }
    assert {n for n in names.values() if "norm" in n or "res_proj" in n} <= undecayed
    assert {n for n in names.values() if n.endswith(("A_log", "dt_bias"))} <= undecayed


@pytest.mark.parametrize(
    ("raw", "query"), [(tiny_k3(), "q_b_proj"), (tiny_kimi_linear(v_head_dim=12), "q_proj")]
)
def test_queries_keys_and_values_are_taken_head_by_head(raw, query):
    model = Transformer(parse_config(raw))
    muon, _ = build_optimizers(model, OptimConfig())
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = {names[id(p)]: group["blocks"] for group in muon.param_groups for p in group["params"]}
    config = parse_config(raw)
    kda, mla = (
        next(i for i, layer in enumerate(model.model.layers) if kind in repr(layer.self_attn))
        for kind in ("KDA", "MLA")
    )
    for part in ("q_proj", "k_proj", "v_proj"):
        assert blocks.pop(f"model.layers.{kda}.self_attn.{part}.weight") == (32,)
    own, v = config.mla.qk_nope_head_dim, config.mla.v_head_dim
    shared = config.mla.qk_rope_head_dim
    assert blocks.pop(f"model.layers.{mla}.self_attn.{query}.weight") == (own + shared,)
    assert blocks.pop(f"model.layers.{mla}.self_attn.kv_b_proj.weight") == (own, v)
    for layer in (kda, mla):
        assert not any(
            cut for name, cut in blocks.items() if name.startswith(f"model.layers.{layer}.")
        )

    whole, _ = build_optimizers(model, OptimConfig(muon_per_head=False))
    assert [group["blocks"] for group in whole.param_groups] == [()]
