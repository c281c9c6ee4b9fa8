"""Bytes of the model's pools, out and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.engine.cache_tiers import tiers_of
from perilune.engine.pools_memory import PoolsMemory
from perilune.model.pools import Pools
from perilune.model.presets import preset

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_and_states_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    """A part of an entry, and into other places; all else stays NaN."""
    pools = Pools.of(preset("tiny-k3"), slots=4, pages=8, device=CPU, dtype=dtype)
    memory = PoolsMemory(pools)
    generator = torch.Generator().manual_seed(1)
    tensors = pools.rows_LPBC, pools.state_LSHKV, pools.window_LSWC
    for x in tensors:
        x.normal_(generator=generator)
    before = [x.clone() for x in tensors]
    rows = memory.new_buffer(3 * memory.page_bytes)
    memory.read_pages([5, 2, 7], rows)
    state = memory.new_buffer(memory.state_bytes)
    memory.read_state(3, state)
    memory.wait()
    for x in tensors:
        x.fill_(torch.nan)
    memory.write_pages([1, 4], rows[memory.page_bytes :])
    memory.write_state(0, state)
    rows_LPBC, *states = before
    assert torch.equal(pools.rows_LPBC[:, [1, 4]], rows_LPBC[:, [2, 7]])
    assert pools.rows_LPBC[:, [0, 2, 3, 5, 6, 7]].isnan().all()
    for now, then in zip(tensors[1:], states, strict=True):
        assert torch.equal(now[:, 0], then[:, 3])
        assert now[:, 1:].isnan().all()


def test_there_is_no_tier_unless_it_is_asked_for() -> None:
    assert tiers_of(None, None) is None
    assert tiers_of(0, None) is None
    assert tiers_of(None, None, num_ranks=2) is None
    assert tiers_of(1, None) is not None


@pytest.mark.parametrize(
    ("host_bytes", "disk", "num_ranks", "message"),
    [
        (0, "d", 1, "a cache on disk needs host memory"),
        (1, None, 2, "keeps its prefix cache on them alone"),
        (None, "d", 2, "keeps its prefix cache on them alone"),
    ],
)
def test_what_cannot_be(host_bytes, disk, num_ranks, message) -> None:
    with pytest.raises(ConfigError, match=message):
        tiers_of(host_bytes, disk, num_ranks=num_ranks)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pools = Pools.of(preset("tiny-k3"), slots=1, pages=2, device=CPU, dtype=torch.float32)
    tiers = tiers_of(None, str(tmp_path / "file"))
    assert tiers is not None
    with pytest.raises(ConfigError, match=r"file cannot hold a cache: .*exists"):
        tiers(pools)
