"""The packed input of one model call.

Legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.sequence import TokenSequence
from perilune.engine.step_model import StepCache
from perilune.model.packing import Packing


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


class Batch(NamedTuple):
    token_ids_T: Tensor
    packing: Packing
    caches: list[StepCache]


def pack(chunks: Sequence[Chunk], device: torch.device) -> Batch:
    """Lays the chunks back to back. Raises ValueError without a chunk."""
    packing = Packing.of([len(chunk.token_ids) for chunk in chunks])
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return Batch(torch.tensor(token_ids, device=device), packing, [chunk.cache for chunk in chunks])
