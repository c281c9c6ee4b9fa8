"""Which sequences share a model call, and the packed input of one.

Legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.sequence import TokenSequence
from perilune.engine.step_model import StepCache
from perilune.kernels.common.packing import Packing

CALL_COST = 32
"""A model call costs about what so many prompt tokens cost (nano on one CPU core)."""


class Chunk(NamedTuple):
    """The tokens that a step feeds to one sequence.

    Holds its own reference to the cache: a sequence that is aborted while the model runs keeps
    valid memory until the step ends.
    """

    sequence: TokenSequence
    token_ids: list[int]
    cache: StepCache
    is_sampled: bool
    """Nothing is left to compute after this chunk, so its last logits give a token."""
    is_prompt: bool


def split_calls(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Deals the chunks of a step out to model calls, so that the calls cost least together.

    Single tokens share one call: the model then takes its recurrent path. The others are padded
    to the longest of their call inside the model, so a call of n chunks counts as CALL_COST + n
    times its longest, and of all ways to cut the chunks, sorted by length, the cheapest is taken.
    """
    singles = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
    longer = sorted(
        (chunk for chunk in chunks if len(chunk.token_ids) > 1), key=lambda c: -len(c.token_ids)
    )
    calls = [singles] if singles else []
    return calls + [longer[start:end] for start, end in _cheapest_cuts(longer)]


def _cheapest_cuts(longer: Sequence[Chunk]) -> list[tuple[int, int]]:
    costs, starts = [0], [0]  # of the first n chunks: least cost, and where the last call begins
    for end in range(1, len(longer) + 1):
        cost, start = min(
            (costs[start] + CALL_COST + (end - start) * len(longer[start].token_ids), start)
            for start in range(end)
        )
        costs.append(cost)
        starts.append(start)
    cuts, end = [], len(longer)
    while end > 0:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts[::-1]


class Batch(NamedTuple):
    token_ids_T: Tensor
    packing: Packing
    caches: list[StepCache]


def pack(chunks: Sequence[Chunk], device: torch.device) -> Batch:
    """Lays the chunks back to back. Raises ValueError without a chunk."""
    packing = Packing.of([len(chunk.token_ids) for chunk in chunks])
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return Batch(torch.tensor(token_ids, device=device), packing, [chunk.cache for chunk in chunks])
