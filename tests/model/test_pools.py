"""What decodes through pools equals sequences that keep their caches apart."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.common.packing import Packing
from perilune.model.cache import KDACache, SequenceCache
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import LatentPool, Pools, StatePool
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import PAGE, Decoding

LENGTHS = (3, PAGE - 1, PAGE, 2 * PAGE + 5)
SLOTS, PAGES = 7, 14
SLOT_OF = (4, 0, 6, 2)
PRESETS = {"k3": tiny_k3(num_hidden_layers=4), "kimi_linear": tiny_kimi_linear(num_hidden_layers=4)}


@pytest.fixture(params=PRESETS)
def model(request) -> Transformer:
    config = parse_config(PRESETS[request.param])
    return random_weights(Transformer(config), torch.Generator().manual_seed(3)).freeze()


def ids(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def prefilled(model: Transformer) -> list[SequenceCache]:
    caches = [model.new_cache() for _ in LENGTHS]
    model(ids(sum(LENGTHS)), Packing.of(LENGTHS), caches)
    return caches


def pages_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """In no order, 0 left out."""
    generator = torch.Generator().manual_seed(1)
    order = iter((torch.randperm(PAGES - 1, generator=generator) + 1).tolist())
    return [[next(order) for _ in range(-(-(n + 3) // PAGE))] for n in lengths]


@torch.inference_mode()
def pools_of(model: Transformer, caches: list[SequenceCache], pages: list[list[int]]) -> Pools:
    """What the caches hold, among NaN."""
    pools = Pools.of(
        model.config,
        slots=SLOTS,
        pages=PAGES,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for i, pool in enumerate(pools.layers):
        for tensor in pool:
            tensor.fill_(torch.nan)
        for slot, own, cache in zip(SLOT_OF, pages, caches, strict=True):
            part = cache.layers[i]
            if isinstance(part, KDACache):
                pool.state_SHKV[slot] = part.state_HKV
                pool.window_SWC[slot] = part.window_WC
            else:
                for at, row in enumerate(part.buffer_SC[: part.length]):
                    pool.rows_PBC[own[at // PAGE], at % PAGE] = row
    return pools


@torch.inference_mode()
def test_steps_through_pools_equal_steps_of_caches(model: Transformer) -> None:
    caches, pages = prefilled(model), pages_of(LENGTHS)
    pools = pools_of(model, caches, pages)
    for i in range(3):
        tokens = ids(len(LENGTHS), seed=20 + i)
        want = model(tokens, Packing.of([1] * len(LENGTHS)), caches)
        rows = zip(SLOT_OF, pages, LENGTHS, strict=True)
        step = pools.step([Decoding(slot, own, n + i + 1) for slot, own, n in rows])
        got = model.step(tokens, pools, step)
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    for part, pool in zip(caches[1].layers, pools.layers, strict=True):
        if isinstance(pool, StatePool):
            assert torch.equal(part.state_HKV, pool.state_SHKV[SLOT_OF[1]])


@torch.inference_mode()
def test_padded_rows_change_nothing_of_anybody(model: Transformer) -> None:
    caches, pages = prefilled(model), pages_of(LENGTHS)
    pools = pools_of(model, caches, pages)
    before = [[t.clone() for t in pool] for pool in pools.layers]
    step = pools.step([Decoding(SLOT_OF[0], pages[0], LENGTHS[0] + 1)], padded_to=3)
    tokens = ids(3, seed=40)
    got = model.step(tokens, pools, step)
    want = model(tokens[:1], Packing.of([1]), caches[:1])
    assert float((got[:1] - want).abs().max()) <= 1e-5 * float(want.abs().max())
    assert torch.isfinite(got).all()
    page, row = pages[0][LENGTHS[0] // PAGE], LENGTHS[0] % PAGE
    for pool, was in zip(pools.layers, before, strict=True):
        if isinstance(pool, LatentPool):
            was[0][page, row] = pool.rows_PBC[page, row]
            was[0][0, 0] = pool.rows_PBC[0, 0]
        else:
            for tensor, old in zip(pool, was, strict=True):
                old[SLOT_OF[0]] = tensor[SLOT_OF[0]]
        for tensor, old in zip(pool, was, strict=True):
            assert torch.equal(tensor.nan_to_num(7e7), old.nan_to_num(7e7))
