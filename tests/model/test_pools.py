"""A step through pools is a step of sequences that keep their caches apart."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.common.packing import Packing
from perilune.model.cache import KDACache, SequenceCache
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import PAGE, LatentPool, Pools, StatePool, Step, latent_pool, state_pool
from perilune.model.presets import tiny_k3, tiny_kimi_linear

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


def table_of(lengths: tuple[int, ...], width: int = 3) -> torch.Tensor:
    """Pages in no order, 0 left out; -1 behind the last."""
    order = iter(
        (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    )
    rows = [[next(order) if j * PAGE < n + 3 else -1 for j in range(width)] for n in lengths]
    return torch.tensor(rows, dtype=torch.int32)


@torch.inference_mode()
def pools_of(model: Transformer, caches: list[SequenceCache], table_NJ: torch.Tensor) -> list:
    """What the caches hold, among NaN."""
    cpu, layers = torch.device("cpu"), []
    for i in range(model.config.num_layers):
        parts = [cache.layers[i] for cache in caches]
        if isinstance(parts[0], KDACache):
            pool = state_pool(model.config, SLOTS, cpu, torch.float32)
            for tensor in pool:
                tensor.fill_(torch.nan)
            for slot, part in zip(SLOT_OF, parts, strict=True):
                pool.state_SHKV[slot] = part.state_HKV
                pool.window_SWC[slot] = part.window_WC
        else:
            pool = latent_pool(model.config, PAGES, cpu, torch.float32)
            pool.rows_PBC.fill_(torch.nan)
            for pages, part in zip(table_NJ.tolist(), parts, strict=True):
                for at, row in enumerate(part.buffer_SC[: part.length]):
                    pool.rows_PBC[pages[at // PAGE], at % PAGE] = row
        layers.append(pool)
    return layers


@torch.inference_mode()
def test_steps_through_pools_equal_steps_of_caches(model: Transformer) -> None:
    caches, table_NJ = prefilled(model), table_of(LENGTHS)
    layers = pools_of(model, caches, table_NJ)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for i in range(3):
        tokens = ids(len(LENGTHS), seed=20 + i)
        want = model(tokens, Packing.of([1] * len(LENGTHS)), caches)
        step = Step.of(torch.tensor(SLOT_OF), table_NJ, lengths + i + 1)
        got = model(tokens, Packing.of([1] * len(LENGTHS)), Pools(layers, step))
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    for part, pool in zip(caches[1].layers, layers, strict=True):
        if isinstance(pool, StatePool):
            assert torch.equal(part.state_HKV, pool.state_SHKV[SLOT_OF[1]])


@torch.inference_mode()
def test_padded_rows_change_nothing_of_anybody(model: Transformer) -> None:
    caches, table_NJ = prefilled(model), table_of(LENGTHS)
    layers = pools_of(model, caches, table_NJ)
    before = [[t.clone() for t in pool] for pool in layers]
    padded = Step.of(
        torch.tensor([SLOT_OF[0], -1]),
        torch.stack([table_NJ[0], torch.full_like(table_NJ[0], -1)]),
        torch.tensor([LENGTHS[0] + 1, 0], dtype=torch.int32),
    )
    tokens = ids(2, seed=40)
    got = model(tokens, Packing.of([1, 1]), Pools(layers, padded))
    want = model(tokens[:1], Packing.of([1]), caches[:1])
    assert float((got[:1] - want).abs().max()) <= 1e-5 * float(want.abs().max())
    assert torch.isfinite(got).all()
    page, row = int(table_NJ[0, LENGTHS[0] // PAGE]), LENGTHS[0] % PAGE
    for pool, was in zip(layers, before, strict=True):
        if isinstance(pool, LatentPool):
            was[0][page, row] = pool.rows_PBC[page, row]
            was[0][0, 0] = pool.rows_PBC[0, 0]
        else:
            for tensor, old in zip(pool, was, strict=True):
                old[SLOT_OF[0]] = tensor[SLOT_OF[0]]
        for tensor, old in zip(pool, was, strict=True):
            assert torch.equal(tensor.nan_to_num(7e7), old.nan_to_num(7e7))
