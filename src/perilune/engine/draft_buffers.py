"""The integers of steps that verify drafts: written on the host step after step, read on the device
at addresses that never change.

Legend: N sequences, Q tokens of each, R = N Q rows, J pages of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from perilune.engine.batch import Chunk
from perilune.engine.lane import Work
from perilune.model.step import NO_SLOT


class Shape(NamedTuple):
    """Of a step that verifies."""

    sequences: int
    each: int
    """Tokens of each, the one that is fed anyway included."""

    @property
    def rows(self) -> int:
        return self.sequences * self.each


class Sizes(NamedTuple):
    """The most of each."""

    sequences: int
    rows: int
    pages: int
    """Of one sequence."""

    @property
    def num_wide(self) -> int:
        """Of int64 that travel: tokens and where they go, of all rows, then slots."""
        return 2 * self.rows + self.sequences

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_wide + 4 * self.sequences * (1 + self.pages)


class DeviceDrafts:
    """What a graph reads, and the tokens that it samples."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        n, rows, num_pages = sizes
        self._bytes = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=device)
        wide = self._bytes[: 8 * sizes.num_wide].view(torch.int64)
        narrow = self._bytes[8 * sizes.num_wide :].view(torch.int32)
        self.id_R, self.row_R, self.slot_N = wide.split([rows, rows, n])
        self.length_N, self._table = narrow[:n], narrow[n:]
        self.table_NJ = torch.zeros(n, num_pages, dtype=torch.int32, device=device)
        self.none_N = torch.zeros_like(self.slot_N)
        """So many tokens of each does a step keep that verifies."""
        self.keep_N = torch.zeros_like(self.slot_N)
        """So many of them count."""
        self.out_R = torch.zeros_like(self.id_R)
        """Tokens that a step has sampled, -1 where none could be."""

    def rest(self) -> None:
        """Makes all rows inert."""
        self._bytes.zero_()
        self.slot_N.fill_(NO_SLOT)
        self.keep_N.zero_()

    def take(self, host: HostDrafts) -> None:
        """One copy for all, and one on the device to where tables lie."""
        n, width, num_bytes = host.loaded
        self._bytes[:num_bytes].copy_(host.bytes_[:num_bytes], non_blocking=True)
        self.table_NJ[:n, :width].copy_(self._table[: n * width].view(n, width))

    def take_kept(self, host: HostDrafts) -> None:
        self.keep_N.copy_(host.keep_N, non_blocking=True)


class HostDrafts:
    """One step's integers, and where its tokens arrive. Whoever fills it waits for `is_free` first,
    and says when it is free again."""

    def __init__(self, sizes: Sizes, pinned: bool) -> None:
        n, rows, _ = sizes
        self.bytes_ = torch.zeros(sizes.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.keep_N = torch.zeros(n, dtype=torch.int64, pin_memory=pinned)
        self.out_R = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._wide_bytes = 8 * sizes.num_wide
        wide = self.bytes_[: self._wide_bytes].view(torch.int64).numpy()
        narrow = self.bytes_[self._wide_bytes :].view(torch.int32).numpy()
        self._id_R, self._row_R, self._slot_N = np.split(wide, [rows, 2 * rows])
        self._length_N, self._table = narrow[:n], narrow[n:]
        self._kept_N = self.keep_N.numpy()
        self.loaded = (0, 0, 0)
        """Sequences, pages of each, and the bytes that hold them."""
        self.is_free: Work = _nothing

    def fill(self, chunks: Sequence[Chunk], shape: Shape, page_len: int) -> None:
        """Inert sequences behind `chunks`.

        Raises:
            ValueError: two chunks have one slot, or one has none or too few pages.
        """
        count, (n, each) = len(chunks), shape
        slots = [chunk.slot for chunk in chunks]
        if min(slots) <= NO_SLOT or len(set(slots)) < count:
            raise ValueError(f"slots {slots} are not one a sequence")
        rows = [row for chunk in chunks for row in _rows(chunk, each, page_len)]
        ids = [*chain.from_iterable(chunk.token_ids for chunk in chunks)]
        padding = shape.rows - len(ids)
        # Plain integers: numpy's calls take longer than a few.
        self._id_R[: shape.rows] = ids + [0] * padding
        self._row_R[: shape.rows] = rows + [0] * padding
        self._slot_N[:n] = slots + [NO_SLOT] * (n - count)
        self._length_N[:n] = [c.num_cached + each for c in chunks] + [0] * (n - count)
        width = max(len(chunk.pages) for chunk in chunks)
        for i, chunk in enumerate(chunks):
            first = i * width
            self._table[first : first + len(chunk.pages)] = chunk.pages
        num_narrow = len(self._length_N) + n * width
        self.loaded = n, width, self._wide_bytes + 4 * num_narrow

    def load(self, n: int, width: int, integers: bytes) -> None:
        """Takes over what another was filled with."""
        self.bytes_.numpy()[: len(integers)] = np.frombuffer(integers, np.uint8)
        self.loaded = n, width, len(integers)

    def integers(self) -> bytes:
        """For `load`."""
        return self.bytes_[: self.loaded[2]].numpy().tobytes()

    def keep(self, num_kept: Sequence[int]) -> None:
        """Of inert sequences behind these it does not matter."""
        self._kept_N[: len(num_kept)] = num_kept


def _rows(chunk: Chunk, each: int, page_len: int) -> list[int]:
    """Where its tokens go, counted through all pages."""
    pages, first = chunk.pages, chunk.num_cached
    end = first + each
    if len(chunk.token_ids) != each or len(pages) * page_len < end:
        raise ValueError(f"{each} tokens behind {first} do not fit on {len(pages)} pages")
    rows = [int(pages[t // page_len]) * page_len + t % page_len for t in range(first, end)]
    if min(rows) < page_len:
        raise ValueError(f"pages {list(pages)} hold the one that is nobody's")
    return rows


def _nothing() -> None:
    pass
