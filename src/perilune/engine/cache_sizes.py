"""How many pages and slots the memory for caches holds."""

from __future__ import annotations

import torch

from perilune.core.errors import ConfigError
from perilune.engine.cost_model import CostModel
from perilune.engine.pooled_memory import Room
from perilune.model.model import Transformer

CPU_BYTES = 512 << 20
"""Most that is taken on a CPU unasked, unless one sequence at full length needs more."""
GPU_SHARE = 0.8
"""Of what weights leave free; the rest is for activations."""

STATE_SHARE = 0.5
"""Of what running sequences leave free, for states that are kept."""


def cost_of(model: Transformer) -> CostModel:
    """In the dtypes of `Transformer.new_pools`."""
    dtype = model.head_weight.dtype
    state_dtype = torch.promote_types(torch.float32, dtype)
    return CostModel.of(model.share, row_bytes=dtype.itemsize, state_bytes=state_dtype.itemsize)


def default_bytes(device: torch.device, cost: CostModel, max_running: int, max_context: int) -> int:
    """On a CPU enough for all running sequences at full length and as much again for what is
    kept of others, at most `CPU_BYTES`; on a GPU a share of what is free."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(GPU_SHARE * free_bytes)
    each = cost.state_bytes + max_context * cost.row_bytes
    return max(min(2 * max_running * each, CPU_BYTES), least_bytes(cost, max_running, max_context))


def least_bytes(cost: CostModel, max_running: int, max_context: int) -> int:
    """A slot a running sequence, one to keep, and one sequence at full length."""
    return (max_running + 1) * cost.state_bytes + (max_context + 128) * cost.row_bytes


def room_of(
    num_bytes: int,
    cost: CostModel,
    *,
    page_len: int,
    max_running: int,
    max_context: int,
    state_share: float = STATE_SHARE,
) -> Room:
    """Slots for all that run; of the rest `state_share` for states that are kept, what is left for
    pages, but pages for one sequence at full length at least.

    Raises:
        ConfigError: there is no room for that, or the share is none.
    """
    if not 0 <= state_share <= 1:
        raise ConfigError(f"the share of states is from 0 to 1, not {state_share}")
    least = least_bytes(cost, max_running, max_context)
    if num_bytes < least:
        raise ConfigError(
            f"{num_bytes} bytes of cache memory do not hold {max_running} running sequences, one "
            f"of them {max_context} tokens long: that takes {least}"
        )
    page_bytes = page_len * cost.row_bytes
    spare = num_bytes - max_running * cost.state_bytes
    full_pages = 1 + -(-max_context // page_len)
    kept = min(int(spare * state_share), spare - full_pages * page_bytes)
    slots = max_running + max(kept // cost.state_bytes, 1)
    pages = max((num_bytes - slots * cost.state_bytes) // page_bytes, full_pages)
    return Room(pages, slots)
