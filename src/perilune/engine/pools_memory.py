"""The model's pools as the off-card tier sees them: bytes of pages and of states.

Legend: L layers of a kind, P pages, B tokens of a page, C latent width, N pages copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perilune.model.pools import Pools


class PoolsMemory:
    """A `CardMemory`. Of a state the recurrent one comes first, then the windows."""

    def __init__(self, pools: Pools) -> None:
        self.page_bytes = pools.page_nbytes
        self.state_bytes = pools.slot_nbytes
        self._pools = pools
        self._is_on_gpu = pools.rows_LPBC.is_cuda
        self._moving: deque[tuple[torch.cuda.Event, np.ndarray]] = deque()
        """Buffers that the device may still read or fill, the oldest first."""

    def new_buffer(self, num_bytes: int) -> np.ndarray:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_on_gpu).numpy()

    def read_pages(self, pages: Sequence[int], out: np.ndarray) -> None:
        for page, host_LBC in zip(pages, self._rows(out), strict=True):
            host_LBC.copy_(self._pools.rows_LPBC[:, page], non_blocking=True)
        self._note_moving(out)

    def read_state(self, slot: int, out: np.ndarray) -> None:
        for pool_LS, host_L in self._states(out):
            host_L.copy_(pool_LS[:, slot], non_blocking=True)
        self._note_moving(out)

    def write_pages(self, pages: Sequence[int], source: np.ndarray) -> None:
        for page, host_LBC in zip(pages, self._rows(source), strict=True):
            self._pools.rows_LPBC[:, page].copy_(host_LBC, non_blocking=True)
        self._note_moving(source)

    def write_state(self, slot: int, source: np.ndarray) -> None:
        for pool_LS, host_L in self._states(source):
            pool_LS[:, slot].copy_(host_L, non_blocking=True)
        self._note_moving(source)

    def wait(self) -> None:
        for event, _ in self._moving:
            event.synchronize()
        self._moving.clear()

    def _rows(self, buffer: np.ndarray) -> Tensor:
        """[N, L, B, C]: page by page, so that a part of an entry is a part of its bytes."""
        rows_LPBC = self._pools.rows_LPBC
        shape = rows_LPBC.shape[0], *rows_LPBC.shape[2:]
        return torch.from_numpy(buffer).view(rows_LPBC.dtype).view(-1, *shape)

    def _states(self, buffer: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        pairs, start = [], 0
        for pool_LS in (self._pools.state_LSHKV, self._pools.window_LSWC):
            size = pool_LS[:, 0].nbytes
            part = torch.from_numpy(buffer[start : start + size]).view(pool_LS.dtype)
            pairs.append((pool_LS, part.view(pool_LS[:, 0].shape)))
            start += size
        return pairs

    def _note_moving(self, buffer: np.ndarray) -> None:
        if self._is_on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._moving.append((event, buffer))
            while self._moving and self._moving[0][0].query():
                self._moving.popleft()
