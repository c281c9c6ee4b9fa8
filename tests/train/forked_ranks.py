"""Ranks of one machine, as processes forked from a script that has imported torch already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def forked(size: int, main: Callable[[Path, int], None], folder: Path) -> bool:
    """Runs `main` as each rank, and says whether one failed."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            main(folder, rank)
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    return any(ends)
