"""Which chunks run together.

Legend: M chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.kernels.kda.reference import CHUNK
from perilune.model.step import Prefilling

CALL_COST = 1
"""What a call of the chunked form costs beside its work, in tiles of `CHUNK` tokens (a KDA layer of
nano on one CPU core: 1 ms, and 1.35 ms a tile)."""


def groups_of(chunks: Sequence[Prefilling], device: torch.device) -> list[Sequence[Prefilling]]:
    """Neighbours. A GPU takes all together. On a CPU each chunk costs what the longest of its
    group does, and the groups are those that cost least: few, where chunks are in order of length.
    """
    if len(chunks) < 2 or device.type != "cpu":
        return [chunks] if chunks else []
    tiles = [-(-s.num_new // CHUNK) for s in chunks]
    cost, start = [0] * (len(chunks) + 1), [0] * (len(chunks) + 1)  # of the first chunks
    for end in range(1, len(chunks) + 1):
        longest, found = 0, []
        for first in range(end - 1, -1, -1):
            longest = max(longest, tiles[first])
            found.append((cost[first] + CALL_COST + (end - first) * longest, first))
        cost[end], start[end] = min(found)
    groups, end = [], len(chunks)
    while end:
        groups.append(chunks[start[end] : end])
        end = start[end]
    return groups[::-1]
