"""Where machine code of the compiled loops is kept between runs.

numba takes a cached function for current while the file that defines it is unchanged, and does not
look at the functions that it calls. So a folder belongs to one state of all the loops' sources.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numba

from perilune.core.env import cache_dir

log = logging.getLogger(__name__)

KERNELS = Path(__file__).parents[1]


def sources() -> list[Path]:
    return [Path(__file__).with_name("cpu_jit.py"), *sorted(KERNELS.glob("*/cpu.py"))]


def folder(files: Iterable[Path]) -> Path:
    """Of machine code from these sources."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return cache_dir() / f"loops-{digest.hexdigest()[:16]}"


def writable(path: Path) -> bool:
    """Whether files can be made in `path`, which is created where it can be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled loops are not kept: %s", error)
        return False
    return os.access(path, os.W_OK)


FOLDER = folder(sources())
KEPT = writable(FOLDER)


def is_empty() -> bool:
    """Whether the loops have yet to be compiled: some twenty seconds."""
    return not KEPT or not any(FOLDER.rglob("*.nbc"))


def keep(compiled: Any) -> Any:
    """Makes a numba function load its machine code from `FOLDER`, and leave it there."""
    if KEPT:
        settings: Any = numba.config
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(FOLDER)
        try:
            compiled.enable_caching()
        finally:
            settings.CACHE_DIR = before
    return compiled
