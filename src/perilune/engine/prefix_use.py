"""What requests read and write in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Published(NamedTuple):
    num_new_tokens: int
    """Rows that were not on the card before: what this request has written."""
    kept_state: bool
    """False: the state was there already, and the slot has been freed."""


@dataclass(slots=True)
class Written:
    """What a sequence has added to the prefix cache."""

    num_tokens: int = 0
    """Rows, whenever they were not there."""
    first_row: int | None = None
    """Rows of its prefix are its own from there on at the latest; None: none is."""
    states: set[int] = field(default_factory=set)
    """Token counts after which the state is its own."""

    def note(self, num_tokens: int, new: Published) -> None:
        """Its first `num_tokens` tokens have been published."""
        self.num_tokens += new.num_new_tokens
        if new.num_new_tokens:
            first_row = num_tokens - new.num_new_tokens
            self.first_row = min(first_row, first_row if self.first_row is None else self.first_row)
        if new.kept_state:
            self.states.add(num_tokens)


class PrefixUse(NamedTuple):
    """What a request learns of the cache."""

    read_tokens: int
    """Of its hit: not computed."""
    written_tokens: int
    """Rows that it published and that were not cached before (`Published.num_new_tokens`)."""
