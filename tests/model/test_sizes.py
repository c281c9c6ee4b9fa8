"""Sizes by arithmetic, against published figures and against real models and pools."""

from dataclasses import replace

import pytest
import torch

from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pools
from perilune.model.presets import nano, preset, tiny_k3, tiny_kimi_linear
from perilune.model.sizes import cache_sizes, count_parameters, count_stored, layer_pattern
from perilune.model.step import PAGE

GIB = 2**30


def test_k3_parameters_are_the_published_ones():
    parameters = count_parameters(preset("kimi-k3"))
    assert round(parameters.total / 1e12, 4) == 2.7795
    assert round(parameters.with_vision / 1e12, 4) == 2.7799
    assert round(parameters.activated / 1e9, 2) == 104.19
    assert round((parameters.with_vision - parameters.total) / 1e6, 1) == 447.4  # 401.2 + 46.1


def test_kimi_linear_parameters_are_the_published_ones():
    parameters = count_parameters(preset("kimi-linear-48b-a3b"))
    assert round(parameters.total / 1e9, 2) == 49.12
    assert round(parameters.activated / 1e9, 2) == 3.11
    assert round((parameters.activated + parameters.input_embedding) / 1e9, 2) == 3.48


def test_k3_stored_totals_are_the_published_ones():
    stored = count_stored(preset("kimi-k3"))
    assert (stored.tensors, stored.elements, stored.bytes) == (
        497_220,
        1_503_647_073_024,
        1_560_860_324_864,
    )


def test_k3_cache_sizes_are_the_published_ones():
    sizes = cache_sizes(preset("kimi-k3"), 1_048_576)
    assert sizes.kda_state == 434_110_464 == 414 * 2**20
    assert sizes.latent_per_token == 27_648
    assert sizes.latent == 27 * GIB
    assert sizes.conv_taps == 69 * 216 * 2**10
    assert round(sizes.all_mla / GIB, 1) == 104.6
    assert sizes.gqa == 372 * GIB
    assert sizes.crossover == 5654
    assert sizes.crossover_state_only == 5462


def test_kimi_linear_cache_sizes_are_the_published_ones():
    sizes = cache_sizes(preset("kimi-linear-48b-a3b"), 1_048_576)
    assert sizes.kda_state == 40 * 2**20
    assert sizes.latent_per_token == 8_064
    assert sizes.latent == 7.875 * GIB
    assert round(sizes.all_mla / GIB, 1) == 30.4


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b-a3b", "nano"])
def test_the_crossover_is_the_first_context_at_which_the_hybrid_is_smaller(name):
    config = preset(name)
    crossover = cache_sizes(config, 1).crossover
    assert crossover is not None
    assert cache_sizes(config, crossover).saving_over_all_mla > 0
    assert cache_sizes(config, crossover - 1).saving_over_all_mla <= 0


def test_without_kda_there_is_no_crossover_and_no_saving():
    config = replace(preset("nano"), mla_layers=tuple(range(8)))
    sizes = cache_sizes(config, 100)
    assert sizes.crossover is None
    assert sizes.total == sizes.all_mla


@pytest.mark.parametrize(
    "raw",
    [nano(), tiny_k3(tie_word_embeddings=True), tiny_kimi_linear(), tiny_k3(num_experts=None)],
)
def test_parameters_are_those_of_the_model(raw):
    config = parse_config(raw)
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config).total == sum(t.numel() for t in model.state_dict().values())


def test_activated_counts_what_one_token_multiplies():
    config = parse_config(tiny_k3())
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    wanted = 0
    for name, tensor in state.items():
        share = 3 / 8 if ".experts." in name else 0 if "embed_tokens" in name else 1
        wanted += tensor.numel() * share
    assert count_parameters(config).activated == wanted


def test_cache_bytes_are_those_of_real_pools():
    config = parse_config(nano())
    on_cpu = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    pools = Pools.of(config, slots=3, pages=5, **on_cpu)
    sizes = cache_sizes(config, PAGE)
    assert pools.slot_nbytes == sizes.kda_state + sizes.conv_taps
    assert pools.page_nbytes == sizes.latent


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("kimi-k3", "23 x (KDA KDA KDA MLA), 1 x (MLA)"),
        ("kimi-linear-48b-a3b", "6 x (KDA KDA KDA MLA), 1 x (KDA KDA MLA)"),
        ("nano", "2 x (KDA KDA KDA MLA)"),
    ],
)
def test_layer_pattern_in_one_line(name, pattern):
    assert layer_pattern(preset(name)) == pattern


def test_a_trailing_kda_layer_is_in_the_pattern():
    config = replace(preset("nano"), mla_layers=(3,), num_layers=6)
    assert layer_pattern(config) == "1 x (KDA KDA KDA MLA), 1 x (KDA KDA)"
