"""FlashMLA is called as it wants to be: a stand-in with its signature answers the truth."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth

from perilune.kernels.bench.cases import Case
from perilune.kernels.mla.bench_cases import decode
from perilune.kernels.mla.bench_peers import FLASH_MLA
from perilune.kernels.mla.reference import mla_decode


def fake_decode(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
):
    assert tile_scheduler_metadata == "metadata"
    assert num_splits is None
    assert (block_table.dtype, cache_seqlens.dtype) == (torch.int32, torch.int32)
    assert q.shape[:2] == (1, 1)
    assert k_cache.shape[1:3] == (64, 1)
    rows_SC = k_cache[block_table[0].long()].flatten(0, 2)[: cache_seqlens[0]]
    o_HC = mla_decode(q[0, 0], rows_SC, head_dim_v, softmax_scale)
    return o_HC[None, None], torch.zeros(1, q.shape[2], 1)


@pytest.fixture(autouse=True)
def flash_mla(monkeypatch):
    module = ModuleType("flash_mla")
    module.__spec__ = object()
    module.get_mla_metadata = lambda *args: ("metadata", None)
    module.flash_mla_with_kvcache = fake_decode
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def measured(tokens):
    case = Case(make=decode(tokens, 3, 24, 16))
    return bound(FLASH_MLA, case, truth(mla_decode))


def test_it_computes_the_same_from_the_same_rows():
    found = measured(128)
    assert found.note == ""
    assert found.error < 1e-6


def test_broken_pages_are_refused():
    assert measured(100).note == "failed: 100 tokens are no whole pages of 64"
