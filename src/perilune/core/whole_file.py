"""Files that are whole or not there, whenever a process ends."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file at `path` at once: a reader sees the old content or the new, and processes
    that write at the same time do not mix theirs. The folder has to be there.

    Raises:
        OSError: it cannot be written; what was at `path` stays.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
