"""Chunks of any size, single tokens and one shot leave the same logits and the same caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.model.cache import KDACache, MLACache, SequenceCache
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear

CLOSE = 1e-4
"""Of the largest value: tiny AttnRes models amplify rounding to 9e-5 between prefill and decode."""
TOKENS = 70


def make_model(raw: dict) -> Transformer:
    return random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(6))


MODELS = {
    # Rounded as in a checkpoint: few tokens then run on weights held as bf16.
    "k3": make_model(tiny_k3(hidden_size=40, num_hidden_layers=5)).bfloat16().float().freeze(),
    "kimi_linear": make_model(tiny_kimi_linear(hidden_size=40, num_hidden_layers=4)).freeze(),
}
IDS = torch.randint(0, 128, (TOKENS,), generator=torch.Generator().manual_seed(8))


@torch.inference_mode()
def read(model: Transformer, ids_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, SequenceCache]:
    """Logits [T, V] of every token and the cache after the last, reading `lengths` at a time."""
    cache = model.new_cache()
    pieces = [model(x, Packing.of([len(x)]), [cache]) for x in ids_T.split(list(lengths))]
    return torch.cat(pieces), cache


ONE_SHOT = {name: read(model, IDS, [TOKENS]) for name, model in MODELS.items()}


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


def assert_close(got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= bound * float(want.abs().max())


def assert_same_state(got: SequenceCache, want: SequenceCache) -> None:
    assert got.length == want.length
    for mine, other in zip(got.layers, want.layers, strict=True):
        if isinstance(mine, KDACache) and isinstance(other, KDACache):
            assert_close(mine.state_HKV, other.state_HKV)
            assert_close(mine.window_WC, other.window_WC)
        else:
            assert isinstance(mine, MLACache)
            assert isinstance(other, MLACache)
            assert mine.length == other.length == got.length
            rows = slice(0, mine.length)
            assert_close(mine.buffer_SC[rows], other.buffer_SC[rows])


def test_one_shot_into_a_cache_equals_no_cache(name):
    with torch.inference_mode():
        assert_close(MODELS[name](IDS, Packing.of([TOKENS])), ONE_SHOT[name][0])


@pytest.mark.parametrize("cut", range(1, TOKENS))
def test_every_cut_agrees_with_one_shot(name, cut):
    logits, cache = read(MODELS[name], IDS, [cut, TOKENS - cut])
    assert_close(logits, ONE_SHOT[name][0])
    assert_same_state(cache, ONE_SHOT[name][1])


@pytest.mark.parametrize(
    "lengths",
    [[1] * TOKENS, [64, *[1] * 6], [1, 32, 33, 1, 1, 2], [7] * 10],
    ids=["single_tokens", "prefill_then_decode", "mixed", "sevens"],
)
def test_single_tokens_and_odd_chunks_agree_with_one_shot(name, lengths):
    logits, cache = read(MODELS[name], IDS, lengths)
    assert_close(logits, ONE_SHOT[name][0])
    assert_same_state(cache, ONE_SHOT[name][1])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
def test_any_chunks_agree_with_one_shot(data, name):
    cuts = sorted(data.draw(st.sets(st.integers(1, TOKENS - 1), max_size=12)))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    logits, cache = read(MODELS[name], IDS, lengths)
    assert_close(logits, ONE_SHOT[name][0])
    assert_same_state(cache, ONE_SHOT[name][1])


@torch.inference_mode()
def prefilled(model: Transformer, lengths: Sequence[int]) -> list[SequenceCache]:
    """Caches of sequences of these lengths, different tokens each."""
    return [read(model, ((IDS + i) % 128)[:n], [n])[1] for i, n in enumerate(lengths)]


def test_decoding_together_equals_decoding_alone(name):
    model = MODELS[name]
    together, lone = prefilled(model, [3, 64, 33]), prefilled(model, [3, 64, 33])
    with torch.inference_mode():
        for step in range(6):
            ids_N = torch.tensor([5, 90, 41]) + step
            got = model(ids_N, Packing.of([1, 1, 1]), together)
            for i, cache in enumerate(lone):
                want = model(ids_N[i : i + 1], Packing.of([1]), [cache])
                assert_close(got[i : i + 1], want)
    for mine, other in zip(together, lone, strict=True):
        assert_same_state(mine, other)


def test_decoding_beside_a_prefill_equals_each_alone(name):
    model, lengths = MODELS[name], [1, 9, 1, 34]
    together, lone = prefilled(model, [3, 64, 33, 1]), prefilled(model, [3, 64, 33, 1])
    with torch.inference_mode():
        got = model(IDS[: sum(lengths)], Packing.of(lengths), together).split(lengths)
        last = prefilled(model, [3, 64, 33, 1])
        last_N = model(IDS[: sum(lengths)], Packing.of(lengths), last, last_only=True)
        for i, ids_T in enumerate(IDS[: sum(lengths)].split(lengths)):
            want = model(ids_T, Packing.of([len(ids_T)]), [lone[i]])
            assert_close(got[i], want)
            assert_close(last_N[i], want[-1])
    for mine, other in zip(together, lone, strict=True):
        assert_same_state(mine, other)


def test_a_clone_and_its_original_go_on_apart(name):
    model = MODELS[name]
    original = prefilled(model, [40])[0]
    clone = original.clone()
    one = Packing.of([1])
    with torch.inference_mode():
        before = original.clone()
        for token in (3, 4, 5):
            model(torch.tensor([token]), one, [clone])
        assert clone.length == 43
        assert original.length == 40
        for kept, layer in zip(before.layers, original.layers, strict=True):
            if isinstance(kept, KDACache) and isinstance(layer, KDACache):
                assert torch.equal(kept.state_HKV, layer.state_HKV)
                assert torch.equal(kept.window_WC, layer.window_WC)
            elif isinstance(kept, MLACache) and isinstance(layer, MLACache):
                assert kept.length == layer.length
                assert torch.equal(kept.buffer_SC[:40], layer.buffer_SC[:40])
        # In turns: a row that both could write would show in the one that wrote first.
        fresh = {token: prefilled(model, [40])[0] for token in (9, 3)}
        assert torch.equal(
            model(torch.tensor([9]), one, [original]), model(torch.tensor([9]), one, [fresh[9]])
        )
        for token in (3, 4, 5):
            model(torch.tensor([token]), one, [fresh[3]])
        assert torch.equal(
            model(torch.tensor([7]), one, [clone]), model(torch.tensor([7]), one, [fresh[3]])
        )


def test_the_state_of_kda_stays_the_same_size_and_latents_double(name):
    empty, full = MODELS[name].new_cache(), prefilled(MODELS[name], [TOKENS])[0]
    kinds = {type(layer) for layer in full.layers}
    assert kinds == {KDACache, MLACache}
    for small, grown in zip(empty.layers, full.layers, strict=True):
        if isinstance(grown, KDACache):
            assert grown.nbytes == small.nbytes
        else:
            assert grown.nbytes == 2 * small.nbytes  # 64 rows held, 70 seen
    assert full.nbytes == sum(layer.nbytes for layer in full.layers)


def test_rows_survive_the_growth_of_the_buffer():
    cache = MLACache(torch.empty(2, 3))
    rows_SC = torch.arange(21.0).view(7, 3)
    for start, end, capacity in ((0, 1, 2), (1, 3, 4), (3, 4, 4), (4, 7, 8)):
        seen_SC = cache.append(rows_SC[start:end])
        assert torch.equal(seen_SC, rows_SC[:end])
        assert cache.buffer_SC.shape[0] == capacity
        assert cache.length == end


def test_a_cache_keeps_states_in_fp32_and_latents_as_the_model_computes():
    model = make_model(tiny_k3()).bfloat16().freeze()
    cache = model.new_cache()
    with torch.inference_mode():
        model(IDS[:9], Packing.of([9]), [cache])
    for layer in cache.layers:
        if isinstance(layer, KDACache):
            assert layer.state_HKV.dtype == layer.window_WC.dtype == torch.float32
        else:
            assert layer.buffer_SC.dtype == torch.bfloat16
