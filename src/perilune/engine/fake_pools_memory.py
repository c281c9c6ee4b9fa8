"""The fake model's pools as the off-card tier sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.engine.fake_pools import FakePools, FakeState


class FakePoolsMemory:
    """A `CardMemory`. A buffer of a state has the number under which a copy of it is kept; buffers
    are filled late, as copies on a stream are."""

    def __init__(self, pools: FakePools) -> None:
        self.page_bytes = pools.page_nbytes
        self.state_bytes = pools.slot_nbytes
        self._pools = pools
        self._states: list[FakeState | None] = []
        self._enqueued: list[tuple[np.ndarray, np.ndarray]] = []

    def new_buffer(self, num_bytes: int) -> np.ndarray:
        return np.full(num_bytes, 0x3E, np.uint8)

    def read_pages(self, pages: Sequence[int], out: np.ndarray) -> None:
        self._enqueued.append((out.view(np.int64), self._pools.row_PB[list(pages)].ravel()))

    def read_state(self, slot: int, out: np.ndarray) -> None:
        state = self._pools.states[slot]
        self._states.append(None if state is None else state.copy())
        number = np.full(len(out) // 8, len(self._states) - 1)
        self._enqueued.append((out.view(np.int64), number))

    def write_pages(self, pages: Sequence[int], source: np.ndarray) -> None:
        self.wait()
        self._pools.row_PB[list(pages)] = source.view(np.int64).reshape(len(pages), -1)

    def write_state(self, slot: int, source: np.ndarray) -> None:
        self.wait()
        state = self._states[source.view(np.int64)[-1]]
        self._pools.states[slot] = None if state is None else state.copy()

    def wait(self) -> None:
        for out, content in self._enqueued:
            out[:] = content
        self._enqueued.clear()
