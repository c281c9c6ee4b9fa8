"""What leaves a GPU's pools for host memory and comes back: the same bytes, the same answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.cache_sizes import cost_of
from perilune.engine.cache_tiers import tiers_of
from perilune.engine.core import EngineCore
from perilune.engine.pooled_memory import Room
from perilune.engine.pools_memory import PoolsMemory
from perilune.model.model import Transformer

Add = Callable[..., None]
"""Of a table: name, value, whether it is as it should be."""


def check_tiers(add: Add, name: str, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
    add(f"{name}: bytes out of the pools and back", *_round_trip(model))
    with tempfile.TemporaryDirectory() as folder:
        for where, disk in (("host memory", None), ("disk", folder)):
            same = _answers_again(model, prompts, disk)
            add(f"{name}: answers from {where}", f"{sum(same)} of {len(same)}", all(same))


def _round_trip(model: Transformer) -> tuple[str, bool]:
    """What was in the places is written over as soon as the copies are enqueued."""
    pools = model.new_pools(slots=40, pages=200)
    memory = PoolsMemory(pools)
    tensors = pools.rows_LPBC, pools.state_LSHKV, pools.window_LSWC
    for x in tensors:
        x.normal_()
    before = [x.clone() for x in tensors]
    pages = torch.randperm(200)[:150].tolist()
    rows = memory.new_buffer(len(pages) * memory.page_bytes)
    states = [memory.new_buffer(memory.state_bytes) for _ in range(40)]
    memory.read_pages(pages, rows)
    for slot, state in enumerate(states):
        memory.read_state(slot, state)
    for x in tensors:
        x.fill_(torch.nan)
    memory.write_pages(pages, rows)
    for slot, state in enumerate(states):
        memory.write_state(39 - slot, state)
    del rows, states  # the copies are still under way
    same = [
        torch.equal(pools.rows_LPBC[:, pages], before[0][:, pages]),
        torch.equal(pools.state_LSHKV.flip(1), before[1]),
        torch.equal(pools.window_LSWC.flip(1), before[2]),
    ]
    return f"{sum(same)} of {len(same)} tensors", all(same)


def _answers_again(
    model: Transformer, prompts: Sequence[Sequence[int]], disk: str | None
) -> list[bool]:
    """Of each prompt that is worth it: the same tokens from what has left the card as from what is
    there, all of it but the last one."""
    cost = cost_of(model)
    kept = sum(2 * cost.state_bytes + (len(prompt) + 64) * cost.row_bytes for prompt in prompts)
    core = EngineCore(
        model,
        room=Room(200, 40),
        cost=cost,
        tiers=tiers_of(kept // 4 if disk else 2 * kept, disk),
        device=model.head_weight.device,
    )
    prompts = [
        prompt for prompt in prompts if len(prompt) > core.scheduler.memory.retention.min_gap
    ]
    _answers(core, model, prompts)
    from_card = _answers(core, model, prompts)
    memory = core.scheduler.memory
    cache, tier = memory.cache, memory.off_card
    assert cache is not None
    assert tier is not None
    pools: Any = memory.pools
    while memory.pages.num_used or memory.slots.num_used:
        cache.evict(1, 1)
        memory.poll()
        while tier._disk is not None and tier._disk.is_writing:
            memory.poll()
    for x in (pools.rows_LPBC, pools.state_LSHKV, pools.window_LSWC):
        x.fill_(torch.nan)
    again = _answers(core, model, prompts)
    core.close()
    return [
        tokens == expected and cached == len(prompt) - 1
        for (tokens, cached), (expected, _), prompt in zip(again, from_card, prompts, strict=True)
    ]


def _answers(
    core: EngineCore, model: Transformer, prompts: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    info = EngineInfo(
        model_id="",
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_position_embeddings,
        eos_ids=frozenset(),
    )
    sequences = [
        admit(
            TokenRequest(
                request_id=str(i),
                prompt_ids=tuple(prompt),
                max_tokens=2,
                sampling=SamplingParams(temperature=0),
            ),
            info,
        )
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        core.add(sequence)
    while core.scheduler.has_work:
        core.step()
    return [(s.generated_ids, s.num_cached) for s in sequences]
