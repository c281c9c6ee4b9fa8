"""What a step feeds to each sequence, and the packed input of all.

Legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.sequence import TokenSequence
from perilune.engine.step_model import StepPools
from perilune.model.step import Cut, Decoding, Pages, Prefilling


class Chunk(NamedTuple):
    """The tokens that a step feeds to one sequence.

    A sequence that is aborted while the model runs gives its memory back at once, but nobody is
    given any before the step has ended.
    """

    sequence: TokenSequence
    token_ids: list[int]
    slot: int
    pages: Pages
    num_cached: int
    """Tokens that slot and pages hold."""
    cuts: Sequence[Cut]
    is_sampled: bool
    """Nothing is left to compute after this chunk, so its last logits give a token."""
    is_decoding: bool
    """Goes through the recurrent form."""
    num_drafted: int = 0
    """The tokens behind the first one that are a draft; others fill up to the step's width."""
    source: int | None = None
    """Where the step before has sampled the token, if the host does not know it yet: `token_ids`
    only holds its place."""

    @property
    def drafted(self) -> list[int]:
        return self.token_ids[1 : 1 + self.num_drafted]


class Row(NamedTuple):
    """Of logits."""

    index: int
    chunk: Chunk
    ahead: int
    """Drafted tokens between the sequence as it is and this row."""


class Plan(NamedTuple):
    """One step.

    Every decoding sequence is in it, so a running stream never waits for a prompt to end.
    """

    decoding: list[Chunk]
    prefilling: list[Chunk]
    """The longest first: those that run together on a CPU are alike then."""
    width: int = 0
    """Tokens behind the first one in every decoding chunk, to be verified."""

    @property
    def chunks(self) -> list[Chunk]:
        return [*self.decoding, *self.prefilling]

    @property
    def sampled(self) -> list[Row]:
        """The rows of the model's logits that may give a token, in their order."""
        decoding = self.decoding
        if self.width == 0:
            rows = [Row(i, chunk, 0) for i, chunk in enumerate(decoding)]
        else:
            each = 1 + self.width
            rows = [
                Row(i * each + ahead, chunk, ahead)
                for i, chunk in enumerate(decoding)
                for ahead in range(1 + chunk.num_drafted)
            ]
        prompts = [chunk for chunk in self.prefilling if chunk.is_sampled]
        num_decoded = len(decoding) * (1 + self.width)
        return rows + [Row(num_decoded + i, chunk, 0) for i, chunk in enumerate(prompts)]


def pack(plan: Plan, device: torch.device) -> Tensor:
    """Token ids [T], the chunks back to back."""
    return torch.tensor([*chain.from_iterable(c.token_ids for c in plan.chunks)], device=device)


def step_of(plan: Plan, pools: StepPools) -> object:
    """What the model's `step` takes beside the tokens."""
    each = 1 + plan.width
    decoding = [Decoding(c.slot, c.pages, c.num_cached + each) for c in plan.decoding]
    prefilling = [
        Prefilling(c.slot, c.pages, c.num_cached, len(c.token_ids), c.cuts, int(c.is_sampled))
        for c in plan.prefilling
    ]
    return pools.step(decoding, prefilling, num_each=each, verify=each > 1)
