"""Room for as many connections as an overloaded server leaves open."""

from __future__ import annotations

import resource


def allow_many() -> None:
    """Lifts this process's limit of open files as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
