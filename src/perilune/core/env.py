"""Every environment variable that perilune reads, in one place."""

from __future__ import annotations

import os

from perilune.core.errors import ConfigError


def num_threads() -> int | None:
    """PERILUNE_THREADS: torch threads of the engine; None leaves torch's own choice.

    Raises:
        ConfigError: it is set to something other than a positive whole number.
    """
    value = os.environ.get("PERILUNE_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"PERILUNE_THREADS must be a positive whole number, not {value!r}")
    return int(value)
