"""The integers of steps that only decode: written on the host step after step, read on the device
at addresses that never change.

Legend: N rows, J pages of each, W pages of the longest sequence of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perilune.engine.batch import Chunk
from perilune.engine.lane import Work
from perilune.engine.sampler import temperature_of
from perilune.model.step import NO_SLOT, Pages

COLUMNS = 6
"""Of 64 bits that travel: tokens, slots, rows, where each token is to be found; as fp64, by what
temperature and random number the next one is drawn."""


class DeviceBuffers:
    """What a graph reads, and the tokens that it samples."""

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        columns_bytes = 8 * (COLUMNS + 1) * num_rows
        num_bytes = columns_bytes + 4 * num_rows * (1 + num_pages)
        bytes_ = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        columns = bytes_[:columns_bytes].view(torch.int64).view(-1, num_rows)
        narrow = bytes_[columns_bytes:].view(torch.int32)
        self.sampled_N, _, self.slot_N, self.row_N, self.source_N, *drawn = columns
        self.temperature_N, self.uniform_N = (column.view(torch.float64) for column in drawn)
        self.known_2N = columns[:2].view(-1)
        """Tokens that the step before has sampled, then those that came from the host."""
        self.length_N = narrow[:num_rows]
        self.table_NJ = torch.zeros(num_rows, num_pages, dtype=torch.int32, device=device)
        self.out_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Tokens that a step has sampled, -1 where none could be."""
        self._table = narrow[num_rows:]
        self._travelled = bytes_[8 * num_rows :]
        self._kept_N: Tensor | None = None

    def rest(self) -> None:
        """Makes all rows inert; what was sampled is kept for `resume`."""
        self._kept_N = self.sampled_N.clone()
        self.slot_N.fill_(NO_SLOT)
        for tensor in (self.row_N, self.source_N, self.length_N):
            tensor.zero_()

    def resume(self) -> None:
        assert self._kept_N is not None
        self.sampled_N.copy_(self._kept_N)

    def take(self, host: HostBuffer) -> None:
        """One copy for all, and one on the device to where tables lie."""
        n, width, num_bytes = host.loaded
        self._travelled[:num_bytes].copy_(host.bytes_[:num_bytes], non_blocking=True)
        self.table_NJ[:n, :width].copy_(self._table[: n * width].view(n, width))


class HostBuffer:
    """One step's integers, and where its tokens arrive. Whoever fills it waits for `is_free` first,
    and says when it is free again."""

    def __init__(self, num_rows: int, num_pages: int, pinned: bool) -> None:
        num_bytes = 8 * COLUMNS * num_rows + 4 * num_rows * (1 + num_pages)
        self.bytes_ = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.out_N = torch.zeros(num_rows, dtype=torch.int64, pin_memory=pinned)
        columns_bytes = 8 * COLUMNS * num_rows
        columns = self.bytes_[:columns_bytes].view(torch.int64).numpy().reshape(COLUMNS, -1)
        self._id_N, self._slot_N, self._row_N, self._source_N, *drawn = columns
        self._temperature_N, self._uniform_N = (column.view(np.float64) for column in drawn)
        narrow = self.bytes_[columns_bytes:].view(torch.int32).numpy()
        self._length_N, self._table = narrow[:num_rows], narrow[num_rows:]
        self.loaded = (0, 0, 0)
        """Rows, pages of each, and the bytes that hold them."""
        self.is_free: Work = _nothing

    @property
    def draws(self) -> bool:
        """Whether a row is drawn."""
        return bool(self._temperature_N[: self.loaded[0]].any())

    def fill(
        self, chunks: Sequence[Chunk], n: int, tables: PageTables, drawn: Sequence[int] = ()
    ) -> None:
        """Inert rows behind `chunks`, `n` in all. `drawn`: rows whose token the device draws.

        Raises:
            ValueError: two chunks have one slot, or one has none or too few pages.
        """
        count = len(chunks)
        slots = [chunk.slot for chunk in chunks]
        if min(slots) <= NO_SLOT or len(set(slots)) < count:
            raise ValueError(f"slots {slots} are not one a row")
        width = tables.update(chunks)
        length_N = np.array([chunk.num_cached + 1 for chunk in chunks], np.int32)
        of_host = len(self._id_N)
        self._id_N[:count] = [chunk.token_ids[0] for chunk in chunks]
        self._source_N[:count] = [
            of_host + i if chunk.source is None else chunk.source for i, chunk in enumerate(chunks)
        ]
        self._slot_N[:count] = slots
        self._length_N[:count] = length_N
        self._row_N[:count] = tables.newest(length_N)
        for column in (self._id_N, self._length_N, self._row_N):
            column[count:n] = 0
        self._source_N[count:n] = of_host + count
        self._slot_N[count:n] = NO_SLOT
        self._temperature_N[:n] = 0
        for i in drawn:
            sampling, is_ahead = chunks[i].sequence.sampling, chunks[i].source is not None
            self._temperature_N[i] = temperature_of(sampling)
            self._uniform_N[i] = sampling.uniform(int(is_ahead))
        np.copyto(self._table[: n * width].reshape(n, width), tables.table_NJ[:n, :width])
        num_bytes = 8 * COLUMNS * len(self._id_N) + 4 * (len(self._id_N) + n * width)
        self.loaded = n, width, num_bytes

    def load(self, n: int, width: int, integers: bytes) -> None:
        """Takes over what another was filled with."""
        self.bytes_.numpy()[: len(integers)] = np.frombuffer(integers, np.uint8)
        self.loaded = n, width, len(integers)

    def integers(self) -> bytes:
        """For `load`."""
        return self.bytes_[: self.loaded[2]].numpy().tobytes()


class PageTables:
    """Of the sequence in each row. A sequence keeps its row as long as those before it stay, and
    then only its new pages are written."""

    def __init__(self, num_rows: int, num_pages: int, page_len: int) -> None:
        self.table_NJ = np.zeros((num_rows, num_pages), np.int32)
        self._page_len = page_len
        self._owners: list[Pages | None] = [None] * num_rows
        self._written = [0] * num_rows

    def update(self, chunks: Sequence[Chunk]) -> int:
        """Takes over what has changed; how many pages the longest has. A sequence's pages are one
        object, which only grows."""
        width = 1
        for i, chunk in enumerate(chunks):
            pages, count = chunk.pages, len(chunk.pages)
            if self._owners[i] is not pages:
                self._owners[i], self._written[i] = pages, 0
            first = self._written[i]
            if first < count:
                self.table_NJ[i, first:count] = pages[first:count]
                self._written[i] = count
            width = max(width, count)
        return width

    def newest(self, length_N: np.ndarray) -> np.ndarray:
        """Of sequences of so many tokens, the row of the last one, counted through all pages."""
        last_N = length_N - 1
        page_N = self.table_NJ[np.arange(len(last_N)), last_N // self._page_len].astype(np.int64)
        if page_N.min() < 1 or (last_N // self._page_len >= self._written[: len(last_N)]).any():
            raise ValueError(f"tokens {length_N} do not fit on the pages of their sequences")
        return page_N * self._page_len + last_N % self._page_len


def _nothing() -> None:
    pass
