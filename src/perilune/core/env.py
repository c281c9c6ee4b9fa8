"""Every environment variable that perilune reads, in one place."""

from __future__ import annotations

import os


def num_threads() -> int | None:
    """PERILUNE_THREADS: torch threads of the engine; None leaves torch's own choice."""
    value = os.environ.get("PERILUNE_THREADS")
    return int(value) if value else None
