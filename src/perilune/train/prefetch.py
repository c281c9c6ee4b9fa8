"""Builds the next batches in a thread while the device works on the current one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from perilune.train.data import Batch, Cursor, PackedLoader


class Prefetcher:
    """Iterates over `loader` up to `depth` batches ahead; `state_dict` follows what was handed out.

    The loader belongs to the prefetcher from here on. `close` ends the thread; so does leaving a
    `with` block. An error of the loader is raised by the next `next()`.
    """

    def __init__(self, loader: PackedLoader, *, depth: int = 4) -> None:
        self._loader = loader
        self._state = loader.state_dict()
        self._ready: queue.Queue[tuple[Batch, Cursor] | Exception] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="prefetch")
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                item = next(self._loader), self._loader.state_dict()
            except Exception as error:
                self._put(error)
                return
            self._put(item)

    def _put(self, item: tuple[Batch, Cursor] | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        batch, self._state = item
        return batch

    def state_dict(self) -> Cursor:
        """The cursor behind the last batch that was handed out."""
        return self._state

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
