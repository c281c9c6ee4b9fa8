"""What requests read and write in the prefix cache."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    num_new_tokens: int
    """Rows that were not on the card before: what this request has written."""
    kept_state: bool
    """False: the state was there already, and the slot has been freed."""


class PrefixUse(NamedTuple):
    """What a request learns of the cache."""

    read_tokens: int
    """Of its hit: not computed."""
    written_tokens: int
    """Rows that it published and that were not cached before (`Published.num_new_tokens`)."""
