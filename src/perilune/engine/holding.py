"""What a running sequence has of both pools."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from perilune.engine.retention import Cut


class Checkpoint(NamedTuple):
    """A state that the step in flight leaves in a slot of its own."""

    cut: Cut
    slot: int


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """One reference to each number in it, given back when the sequence ends or is preempted."""

    slot: int
    pages: array[int]
    """In the order of the sequence's tokens, 32 bits each: copied at memory speed."""
    num_known: int
    """Tokens of the sequence when it was given this."""
    num_cached: int
    """Those of them that the prefix cache had."""
    cuts: list[Cut] = field(default_factory=list)
    """Where states are to be kept, rising."""
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def last_cut(self) -> int:
        """The tokens after which the last state of its prompt will be kept; 0: none is to come."""
        if self.cuts:
            return self.cuts[-1].num_tokens
        return self.checkpoints[-1].cut.num_tokens if self.checkpoints else 0
