"""What stands behind the card's memory: how much of the host's, and which folder on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError
from perilune.engine.cache_files import CacheFiles
from perilune.engine.disk_tier import DiskTier
from perilune.engine.off_card import OffCard
from perilune.engine.pools_memory import PoolsMemory

STAGE_BYTES = 256 << 20
"""Of host memory, through which a disk is reached where no more is given."""
DISK_SHARE = 0.5
"""Of what is free where the folder is."""

Tiers = Callable[[Any], OffCard]
"""Makes the off-card tier of a model's pools."""


def tiers_of(host_bytes: int | None, disk_cache: str | None, *, num_ranks: int = 1) -> Tiers | None:
    """None: what finds no room on the card is forgotten.

    `host_bytes`: None takes as much as a disk needs, or none without one.

    Raises:
        ConfigError: several ranks, whose parts would have to move together; or a disk without
            memory to move what it holds through.
    """
    if num_ranks > 1:
        if host_bytes or disk_cache is not None:
            raise ConfigError("a model that GPUs share keeps its prefix cache on them alone")
        return None
    if host_bytes is None:
        host_bytes = 0 if disk_cache is None else STAGE_BYTES
    if disk_cache is not None and host_bytes == 0:
        raise ConfigError("a cache on disk needs host memory, through which it is read")
    if host_bytes == 0:
        return None
    return lambda pools: OffCard(
        PoolsMemory(pools),
        host_bytes=host_bytes,
        disk=None if disk_cache is None else _disk(Path(disk_cache)),
    )


def _disk(directory: Path) -> DiskTier:
    try:
        files = CacheFiles(directory)
        max_bytes = int(DISK_SHARE * shutil.disk_usage(directory).free)
    except OSError as error:
        raise ConfigError(f"{directory} cannot hold a cache: {error}") from error
    return DiskTier(files, max_bytes, ThreadPoolExecutor(1, "perilune-cache"))
