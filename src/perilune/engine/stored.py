"""What names a piece of the prefix cache that has left the card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Stored:
    """Pages or a state in host memory or on disk. Compared by identity; `off_card` owns the bytes.

    One name has one user, who forgets it or is told that it was lost.
    """

    number: int
    num_bytes: int
    first_page: int = 0
    """Of pages: the index, within its sequence, of the first one."""
