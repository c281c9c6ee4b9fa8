"""The stacks of `bench contexts`: sizes, what a step calls and reads, and that it goes on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from perilune.cli.model import model_info
from perilune.core.errors import ConfigError
from perilune.kernels.bench.cases import bench
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.registry import recorded
from perilune.model.contexts.gqa import GQACache
from perilune.model.contexts.measure import chosen_experts
from perilune.model.contexts.plan import (
    ALL_MLA,
    GQA,
    HYBRID,
    STACKS,
    Case,
    cache_bytes,
    capacity,
    first_layer,
    planned,
    stack_config,
)
from perilune.model.contexts.prefill import prefill
from perilune.model.contexts.roofline import expected_experts, prefill_flops, roofline
from perilune.model.contexts.run import ops_of
from perilune.model.contexts.stacks import GQAStep, PooledStep, random_layers
from perilune.model.layer_bench import inputs_of
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pools
from perilune.model.presets import preset, tiny_k3
from perilune.model.step import PAGE

K3 = preset("kimi-k3")
TINY = parse_config(tiny_k3(num_hidden_layers=8))
BF16, FP32 = torch.bfloat16, torch.float32
MILLION = 1 << 20


def drawn():
    return torch.Generator().manual_seed(3)


def made(stack, n, context, dtype=FP32, config=TINY):
    layers = random_layers(config, stack, drawn(), dtype)
    told = context, n, drawn(), dtype
    if stack == GQA:
        return layers, GQAStep(config, layers, *told)
    return layers, PooledStep(config, stack, layers, *told)


@pytest.mark.parametrize("context", [4096, MILLION])
@pytest.mark.parametrize("stack", [HYBRID, ALL_MLA])
def test_pools_allocate_what_model_info_computes(stack, context):
    """At K3's own widths, where nothing is laid out."""
    n, pages = 3, context // PAGE
    pools = Pools.of(
        stack_config(K3, stack),
        slots=n,
        pages=n * pages + 1,
        device=torch.device("meta"),
        dtype=BF16,
    )
    assert pools.nbytes - pools.page_nbytes == n * cache_bytes(K3, stack, context)
    told = model_info(stack_config(K3, stack), context)["cache"]["total"]
    assert told == cache_bytes(K3, stack, context)


def test_the_yardstick_allocates_what_model_info_computes():
    cache = GQACache.of(2, 128, drawn(), BF16)
    assert 4 * cache.nbytes == 2 * cache_bytes(K3, GQA, 128)
    assert cache_bytes(K3, GQA, 128) == model_info(stack_config(K3, HYBRID), 128)["cache"]["gqa"]


@pytest.mark.parametrize("stack", STACKS)
def test_a_step_says_what_its_caches_take(stack):
    _, step = made(stack, 3, 128, BF16)
    assert step.cache_bytes == 3 * cache_bytes(TINY, stack, 128)


def test_what_70_gb_hold():
    held = {stack: capacity(K3, stack, MILLION, 70 * 10**9) for stack in STACKS}
    assert held == {HYBRID: 57, ALL_MLA: 14, GQA: 4}
    names = [case.name for case in planned(K3, (4096, MILLION), (4, 64), 70 * 10**9)]
    assert names[:6] == [
        "hybrid_L1048576_N57",
        "hybrid_L1048576_N4",
        "mla_L1048576_N14",
        "mla_L1048576_N4",
        "gqa_L1048576_N4",
        "hybrid_L1048576_prefill",
    ]
    assert names[6:9] == ["hybrid_L4096_N2885", "hybrid_L4096_N64", "hybrid_L4096_N4"]
    assert len(names) == len(set(names)) == 15


def test_the_layers_come_from_the_middle():
    assert first_layer(K3) == 44
    assert [K3.is_mla(i) for i in range(44, 48)] == [False, False, False, True]
    with pytest.raises(ConfigError, match="three KDA layers"):
        first_layer(replace(K3, mla_layers=(0, 1, 2)))


OPS = {
    HYBRID: {"kda_step": 3, "mla_decode": 1},
    ALL_MLA: {"kda_step": 0, "mla_decode": 4},
    GQA: {"kda_step": 0, "mla_decode": 0},
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_step_runs_four_layers_with_experts(stack):
    _, step = made(stack, 2, 70)
    with recorded() as calls:
        out_ND = step()
    ops = [call.op for call in calls]
    assert out_ND.shape == (2, TINY.hidden_size)
    assert torch.isfinite(out_ND).all()
    assert ops.count("experts_mxfp4") == 4
    assert {op: ops.count(op) for op in OPS[stack]} == OPS[stack]
    assert set(ops) <= ops_of([Case(stack, 70, 2)])


@pytest.mark.parametrize("stack", [HYBRID, ALL_MLA])
def test_a_loaded_step_decodes_at_that_length(stack):
    _, step = made(stack, 2, 200)
    with recorded() as calls:
        for num_tokens in (199, 200):
            step.load(num_tokens)
            step()
    lengths = [call.args[3].tolist() for call in calls if call.op == "mla_decode"]
    assert lengths[-1] == [200, 200]
    with recorded() as calls:
        step.load(64)
        step()
    assert {tuple(c.args[3].tolist()) for c in calls if c.op == "mla_decode"} == {(64, 64)}


def test_the_yardstick_sees_its_whole_context_and_keeps_the_newest_token():
    layers, step = made(GQA, 2, 70)
    cache = layers[2].self_attn.cache
    before = cache.k_NGLK.clone()
    step()
    assert torch.equal(cache.k_NGLK[:, :, :-1], before[:, :, :-1])
    assert not torch.equal(cache.k_NGLK[:, :, -1], before[:, :, -1])
    out_ND = step()
    for oldest in (cache.k_NGLK, cache.v_NGLK):
        oldest[:, :, 0] *= 30
    assert not torch.allclose(step(), out_ND)
    step.free()
    assert cache is not layers[2].self_attn.cache


def test_choices_are_spread_as_if_drawn():
    """Of 512 tokens and 64 experts; the mean of four layers strays by less than a tenth."""
    raw = tiny_k3(num_hidden_layers=8, num_experts=64, num_experts_per_token=2)
    config = parse_config(raw)
    _, step = made(HYBRID, 24, 64, config=config)
    chosen = chosen_experts(step)
    assert len(chosen) == 4
    assert sum(chosen) / 4 == pytest.approx(expected_experts(config, 24), rel=0.1)


@pytest.mark.parametrize("stack", STACKS)
def test_the_roofline_is_what_the_ops_declare(stack):
    """Derived apart: from sizes here, from what each op was given there."""
    n, context = 3, 128
    layers, step = made(stack, n, context, BF16)
    with recorded() as calls:
        step()
    chosen = [len(call.args[1].unique()) for call in calls if call.op == "experts_mxfp4"]
    parts = roofline(TINY, stack, layers, n, context, chosen).parts
    works = defaultdict(list)
    for call in calls:
        inputs = inputs_of(call)
        tokens = {"experts_mxfp4": ["x_TL", "x_TL"], "mla_decode": ["q_NQHC"]}.get(call.op, [])
        aside = sum(inputs[name].nbytes for name in tokens)
        work = bench(call.op).work(inputs, False)
        if call.op == "mla_decode":
            aside += inputs["q_NQHC"][..., : inputs["kv_lora_rank"]].numel() * 2
        if call.op == "kda_step":
            aside += work.bytes - 2 * n * (
                inputs["state_SHKV"][0].nbytes + inputs["window_SWC"][0].nbytes
            )
        works[call.op].append((work.bytes - aside, work.flops))
    sums = {op: tuple(map(sum, zip(*each, strict=True))) for op, each in works.items() if each}
    # Tiles pad the experts of toy sizes.
    assert parts["experts"].bytes == sums["experts_mxfp4"][0]
    if stack != GQA:
        assert parts["latents"] == sums["mla_decode"]
    if stack == HYBRID:
        assert parts["states"] == sums["kda_step"]
    weights = sum(p.nbytes for layer in layers for p in layer.parameters())
    assert parts["dense weights"].bytes == weights
    seconds = roofline(TINY, stack, layers, n, context, chosen).seconds(Ceilings(1e9, 1e30))
    assert sum(seconds.values()) == pytest.approx(sum(w.bytes for w in parts.values()) / 1e9)


def test_k3_s_roofline_at_a_million_tokens():
    """By hand: 57 sequences of 1,152 bytes a token are 68.9 GB; two products of 576 and 512
    channels for 96 heads."""
    config = stack_config(K3, HYBRID)
    assert 57 * MILLION * config.mla.cache_width * 2 == 68_853_694_464
    assert expected_experts(K3, 57) == pytest.approx(575.3, abs=0.5)


def test_prefill_s_products_are_those_of_its_ops():
    """In one chunk, with experts of whole tiles."""
    config = parse_config(tiny_k3(num_hidden_layers=8, moe_intermediate_size=64))
    layers = random_layers(config, HYBRID, drawn(), FP32)
    with recorded() as calls:
        prefill(config, layers, 64, 64, drawn(), FP32)
    products = {"linear", "scores", "experts_mxfp4", "mla_prefill"}
    half = calls[: len(calls) // 2]  # the first run is for what is compiled
    works = [bench(c.op).work(inputs_of(c), False).flops for c in half if c.op in products]
    assert prefill_flops(config, layers, 64) == pytest.approx(sum(works), rel=0.02)


def test_prefill_goes_on_from_chunk_to_chunk():
    layers = random_layers(TINY, HYBRID, drawn(), FP32)
    with recorded() as calls:
        done = prefill(TINY, layers, 256, 64, drawn(), FP32)
    assert done.finite
    assert len(done.chunk_s) == 4
    assert done.seconds == pytest.approx(sum(done.chunk_s))
    seen = [inputs_of(call)["keys"] for call in calls if call.op == "mla_prefill"]
    rows = [None if keys is None else keys.lengths for keys in seen[-4:]]
    assert [None if r is None else tuple(r) for r in rows] == [None, (128,), (192,), (256,)]
    assert {call.op for call in calls} <= ops_of([Case(HYBRID, 256, 0)])
