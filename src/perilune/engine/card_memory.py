"""What the off-card tier asks of the pools' memory; plain arrays have it in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class CardMemory(Protocol):
    """Copies between the pools and host memory, in all layers at once.

    Buffers are uint8 [bytes]. On a GPU they are pinned, and copies are enqueued on the stream of
    the model's steps: what is enqueued later sees them done. Until then the implementation itself
    keeps the buffer alive.
    """

    page_bytes: int
    """Of one page, in all layers."""
    state_bytes: int
    """Of one slot, in all layers."""

    def new_buffer(self, num_bytes: int) -> np.ndarray: ...

    def read_pages(self, pages: Sequence[int], out: np.ndarray) -> None: ...

    def read_state(self, slot: int, out: np.ndarray) -> None: ...

    def write_pages(self, pages: Sequence[int], source: np.ndarray) -> None: ...

    def write_state(self, slot: int, source: np.ndarray) -> None: ...

    def wait(self) -> None:
        """Returns when every buffer that was read into holds its bytes."""
        ...
