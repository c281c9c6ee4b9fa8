"""The lower part of the off-card tier: files, bounded in bytes, moved by a thread of their own.

Only that thread touches the files' contents. Everything else happens in calls of this class, made
by the thread that owns the cache.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perilune.engine.cache_files import CacheFiles
from perilune.engine.stored import Stored


@dataclass(slots=True)
class _Move:
    future: Future[None]
    buffer: np.ndarray
    is_write: bool
    is_forgotten: bool = False


class Moved(NamedTuple):
    """A read or write that has ended."""

    stored: Stored
    buffer: np.ndarray
    is_write: bool
    is_forgotten: bool
    """`remove` was called in the meantime."""
    error: BaseException | None


class DiskTier:
    def __init__(self, files: CacheFiles, max_bytes: int, executor: Executor) -> None:
        """`executor` has one thread, so that a read is not slowed by many writes."""
        self._files = files
        self._max_bytes = max_bytes
        self._executor = executor
        self._held: dict[Stored, None] = {}  # files that are whole, the oldest first
        self._moves: dict[Stored, _Move] = {}
        self.used_bytes = 0
        """Of files that are whole or being written."""

    @property
    def is_writing(self) -> bool:
        return any(move.is_write for move in self._moves.values())

    def is_moving(self, stored: Stored) -> bool:
        return stored in self._moves

    def holds(self, stored: Stored) -> bool:
        return stored in self._held

    def touch(self, stored: Stored) -> None:
        """It becomes the youngest."""
        if stored in self._held:
            self._held[stored] = self._held.pop(stored)

    def oldest(self) -> Stored | None:
        """Of the files that are not being read."""
        return next((stored for stored in self._held if stored not in self._moves), None)

    def fits(self, stored: Stored, *, beside: bool) -> bool:
        """Whether its file fits, beside the others or at all."""
        size = CacheFiles.file_bytes(stored.num_bytes)
        return size + (self.used_bytes if beside else 0) <= self._max_bytes

    def start_write(self, stored: Stored, buffer: np.ndarray) -> None:
        """`buffer` must not change until the write has been reported by `ended`."""
        future = self._executor.submit(self._files.write, stored.number, buffer)
        self._moves[stored] = _Move(future, buffer, is_write=True)
        self.used_bytes += CacheFiles.file_bytes(stored.num_bytes)

    def start_read(self, stored: Stored, buffer: np.ndarray) -> None:
        future = self._executor.submit(self._files.read, stored.number, buffer)
        self._moves[stored] = _Move(future, buffer, is_write=False)

    def remove(self, stored: Stored) -> None:
        """Deletes the file; one that is being read or written, when that has ended."""
        if stored in self._moves:
            self._moves[stored].is_forgotten = True
        elif stored in self._held:
            del self._held[stored]
            self._delete(stored)

    def ended(self) -> list[Moved]:
        """Reads and writes that have ended since the last call."""
        done = [(stored, move) for stored, move in self._moves.items() if move.future.done()]
        return [self._end(stored, move) for stored, move in done]

    def wait(self, timeout_s: float) -> None:
        """Returns when a read has ended, or none runs."""
        reads = [move.future for move in self._moves.values() if not move.is_write]
        wait(reads, timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Waits for the moves and removes all files."""
        for move in self._moves.values():
            move.future.exception()
        self._files.close()

    def check(self) -> None:
        """Asserts the bound, and that the files in use are those counted."""
        written = {stored for stored, move in self._moves.items() if move.is_write}
        assert not written & self._held.keys()
        sizes = [CacheFiles.file_bytes(s.num_bytes) for s in written | self._held.keys()]
        assert self.used_bytes == sum(sizes) <= self._max_bytes

    def _end(self, stored: Stored, move: _Move) -> Moved:
        del self._moves[stored]
        error = move.future.exception()
        if move.is_write:
            self._held[stored] = None
        if move.is_forgotten or (move.is_write and error is not None):
            self.remove(stored)
        return Moved(stored, move.buffer, move.is_write, move.is_forgotten, error)

    def _delete(self, stored: Stored) -> None:
        self._files.remove(stored.number)
        self.used_bytes -= CacheFiles.file_bytes(stored.num_bytes)
