"""Pools' memory in plain arrays, in which every row and state tells the prefix that made it.

Legend: P pages, B tokens of a page, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

POISON = -(2**62)
"""What freed and never written memory holds."""


def tags(tokens: Sequence[int]) -> list[int]:
    """One number for each prefix of `tokens`, from the empty one on."""
    found = [1]
    for token in tokens:
        found.append((found[-1] * 1_000_003 + token + 7) % (2**61 - 1))
    return found


class ArrayMemory:
    """A `CardMemory`. Reads fill their buffers late, as copies on a stream do."""

    def __init__(self, num_pages: int, num_slots: int, page_len: int) -> None:
        self.row_PB = np.full((num_pages, page_len), POISON, np.int64)
        self.state_S = np.full((num_slots, 3), POISON, np.int64)  # heavier than a row
        self.page_bytes = self.row_PB[0].nbytes
        self.state_bytes = self.state_S[0].nbytes
        self._enqueued: list[tuple[np.ndarray, bytes]] = []

    def compute(self, tokens: Sequence[int], start: int, end: int, table: Sequence[int]) -> None:
        """Writes the rows of tokens `start` to `end`, as a model would."""
        page_len = self.row_PB.shape[1]
        for index in range(start, end):
            page, row = divmod(index, page_len)
            self.row_PB[table[page], row] = tags(tokens[: index + 1])[-1]

    def keep(self, tokens: Sequence[int], slot: int) -> None:
        """Writes the state after `tokens`."""
        self.state_S[slot] = tags(tokens)[-1]

    def rows(self, table: Sequence[int], num_tokens: int) -> list[int]:
        """What stands in the first rows of a page table."""
        return self.row_PB[list(table)].reshape(-1)[:num_tokens].tolist()

    def free_pages(self, pages: Sequence[int]) -> None:
        self.row_PB[pages] = POISON

    def free_slots(self, slots: Sequence[int]) -> None:
        self.state_S[slots] = POISON

    def new_buffer(self, num_bytes: int) -> np.ndarray:
        return np.full(num_bytes, 0x3E, np.uint8)

    def read_pages(self, pages: Sequence[int], out: np.ndarray) -> None:
        self._enqueued.append((out, self.row_PB[pages].tobytes()))

    def read_state(self, slot: int, out: np.ndarray) -> None:
        self._enqueued.append((out, self.state_S[slot].tobytes()))

    def write_pages(self, pages: Sequence[int], source: np.ndarray) -> None:
        self.wait()
        self.row_PB[pages] = source.view(np.int64).reshape(len(pages), -1)

    def write_state(self, slot: int, source: np.ndarray) -> None:
        self.wait()
        self.state_S[slot] = source.view(np.int64)

    def wait(self) -> None:
        for out, content in self._enqueued:
            out[:] = np.frombuffer(content, np.uint8)
        self._enqueued.clear()


class LateExecutor(Executor):
    """Runs what was submitted when it is told to, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, num: int | None = None) -> None:
        for future, call in self.waiting[:num]:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        del self.waiting[:num]
