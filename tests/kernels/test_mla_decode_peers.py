"""FlashMLA is called as it wants to be: a stand-in with its signature answers the truth."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth

from perilune.kernels.bench.cases import Case
from perilune.kernels.mla import bench_peers
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
    assert k_cache.shape[1:3] == (64, 1)
    assert causal == (q.shape[1] > 1)
    o_NQHC = mla_decode(q, k_cache[:, :, 0], block_table, cache_seqlens, head_dim_v, softmax_scale)
    return o_NQHC, torch.zeros(q.shape[0], q.shape[2], q.shape[1])


@pytest.fixture(autouse=True)
def flash_mla(monkeypatch):
    module = ModuleType("flash_mla")
    module.__spec__ = object()
    module.get_mla_metadata = lambda *args: ("metadata", None)
    module.flash_mla_with_kvcache = fake_decode
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def measured(contexts, queries=1):
    case = Case(make=decode(contexts, 3, 24, 16, queries))
    return bound(FLASH_MLA, case, truth(mla_decode))


@pytest.mark.parametrize(("contexts", "queries"), [((128,), 1), ((100, 1, 65), 3)])
def test_it_computes_the_same_from_the_same_rows(contexts, queries):
    found = measured(contexts, queries)
    assert found.note == ""
    assert found.errors.outputs < 1e-6


def test_other_pages_are_refused(monkeypatch):
    monkeypatch.setattr(bench_peers, "PAGE", 32)
    assert measured((128,)).note == "failed: pages of 64 rows are no pages of 32"
