"""Bytes of cache memory become pages and slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.engine.cache_sizes import cost_of, default_bytes, least_bytes, room_of
from perilune.engine.cost_model import CostModel
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.presets import preset


@given(
    st.integers(1, 10_000),
    st.integers(1, 10**8),
    st.integers(1, 64),
    st.integers(1, 10**6),
    st.integers(0, 10**12),
)
def test_all_run_one_at_full_length_and_nothing_is_wasted(
    row_bytes: int, state_bytes: int, max_running: int, max_context: int, more: int
) -> None:
    cost = CostModel(token_flops=1.0, pair_flops=1.0, row_bytes=row_bytes, state_bytes=state_bytes)
    sizes = {"page_len": 64, "max_running": max_running, "max_context": max_context}
    least = least_bytes(cost, max_running, max_context)
    with pytest.raises(ConfigError, match=f"that takes {least}"):
        room_of(least - 1, cost, **sizes)
    room = room_of(least + more, cost, **sizes)
    assert room.slots > max_running
    assert (room.pages - 1) * 64 >= max_context
    used = room.slots * state_bytes + room.pages * 64 * row_bytes
    assert least + more - 64 * row_bytes - state_bytes < used <= least + more


def test_a_share_of_what_running_sequences_leave_goes_to_states() -> None:
    cost = CostModel(token_flops=1.0, pair_flops=1.0, row_bytes=10, state_bytes=1000)
    sizes = {"page_len": 10, "max_running": 4, "max_context": 100}
    slots = [room_of(104_000, cost, **sizes, state_share=x).slots for x in (0, 0.1, 0.5, 1)]
    assert slots == [4 + 1, 4 + 10, 4 + 50, 4 + 98]
    with pytest.raises(ConfigError, match=r"the share of states is from 0 to 1, not 1\.5"):
        room_of(104_000, cost, **sizes, state_share=1.5)


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_the_cost_is_that_of_real_pools(name: str) -> None:
    model = random_weights(Transformer(preset(name)), torch.Generator().manual_seed(1))
    cost = cost_of(model)
    pools = model.new_pools(slots=3, pages=5)
    assert pools.slot_nbytes == cost.state_bytes
    assert pools.page_nbytes == model.page_len * cost.row_bytes


def test_a_cpu_is_asked_for_two_rounds_and_a_bounded_number_of_bytes() -> None:
    cost = CostModel(token_flops=1.0, pair_flops=1.0, row_bytes=100, state_bytes=10_000)
    cpu = torch.device("cpu")
    assert default_bytes(cpu, cost, 4, 1000) == 2 * 4 * 110_000
    assert default_bytes(cpu, cost, 64, 10**6) == 512 << 20
    assert default_bytes(cpu, cost, 64, 10**9) == least_bytes(cost, 64, 10**9)
