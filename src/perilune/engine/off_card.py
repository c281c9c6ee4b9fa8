"""Where evicted rows and states go: host memory first, then disk; each bounded in bytes.

The oldest entries are written to disk ahead of need, and give their memory up once they are there
and room is wanted. What finds no room is lost, and so is what disk returns damaged: the cache then
misses, and says so in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import numpy as np

from perilune.engine.cache_files import CacheFileError
from perilune.engine.card_memory import CardMemory
from perilune.engine.disk_tier import DiskTier, Moved
from perilune.engine.stored import Stored

_log = logging.getLogger(__name__)


class OffCard:
    """Belongs to the thread that owns the cache, as the cache does."""

    def __init__(
        self,
        memory: CardMemory,
        *,
        host_bytes: int,
        disk: DiskTier | None = None,
        write_above: float = 0.5,
    ) -> None:
        """Writing to disk begins when `write_above` of the host's bytes are not there as well."""
        self._memory = memory
        self._host_bytes = host_bytes
        self._disk = disk
        self._write_above = write_above * host_bytes
        self._can_write = True
        self._in_host: dict[Stored, np.ndarray] = {}  # the oldest first
        self._unwritten: dict[Stored, None] = {}  # of those in host memory, the oldest first
        self._unwritten_bytes = 0
        self._lost: list[Stored] = []
        self._next_number = 0
        self.host_used = 0
        """Bytes of all buffers, those that a thread still reads or fills included."""

    def put_pages(self, pages: Sequence[int], first_page: int) -> Stored | None:
        """Copies pages, of which the first is number `first_page` of its sequence; None: no room.

        They may be freed at once: whoever writes them next does so behind the copy.
        """
        num_bytes = len(pages) * self._memory.page_bytes
        return self._put(num_bytes, first_page, lambda out: self._memory.read_pages(pages, out))

    def put_state(self, slot: int) -> Stored | None:
        """As `put_pages`."""
        num_bytes = self._memory.state_bytes
        return self._put(num_bytes, 0, lambda out: self._memory.read_state(slot, out))

    def write_pages(self, stored: Stored, first_page: int, pages: Sequence[int]) -> bool:
        """Copies pages `first_page` and on of a prepared entry to `pages`; False: it was lost."""
        buffer = self._in_host.get(stored)
        if buffer is None:
            return False
        size = self._memory.page_bytes
        start = (first_page - stored.first_page) * size
        self._memory.write_pages(pages, buffer[start : start + len(pages) * size])
        return True

    def write_state(self, stored: Stored, slot: int) -> bool:
        """As `write_pages`."""
        buffer = self._in_host.get(stored)
        if buffer is None:
            return False
        self._memory.write_state(slot, buffer)
        return True

    def can_prepare(self, entries: Collection[Stored]) -> bool:
        """Whether host memory can hold them all at once."""
        return sum(stored.num_bytes for stored in entries) <= self._host_bytes

    def prepare(self, entries: Collection[Stored]) -> bool:
        """Brings entries into host memory; False: some are still being read."""
        for stored in entries:
            if stored in self._in_host:
                self._in_host[stored] = self._in_host.pop(stored)  # now the youngest
            if stored in self._unwritten:
                self._unwritten[stored] = self._unwritten.pop(stored)
            if self._disk is not None:
                self._disk.touch(stored)
        for stored in entries:
            self._start_read(stored, entries)
        self.poll()
        return not any(self._is_only_on_disk(stored) for stored in entries)

    def forget(self, stored: Stored) -> None:
        """Frees an entry; one that was lost is left alone."""
        buffer = self._in_host.pop(stored, None)
        self._note_written(stored)
        is_moving = self._disk is not None and self._disk.is_moving(stored)
        if buffer is not None and not is_moving:
            self.host_used -= stored.num_bytes
        if self._disk is not None:
            self._disk.remove(stored)

    def drain_lost(self) -> list[Stored]:
        """Entries that have gone without being forgotten, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def poll(self) -> None:
        """Takes note of reads and writes that have ended, and starts the next write."""
        if self._disk is not None:
            for moved in self._disk.ended():
                self._note(moved)
            self._write_ahead(self._disk)

    def wait(self) -> None:
        """Returns when a read from disk has ended, at the latest after a tenth of a second."""
        if self._disk is not None:
            self._disk.wait(0.1)

    def check(self, known: Collection[Stored]) -> None:
        """Asserts the bounds, and that what the cache knows of is here or reported lost."""
        kept = sum(stored.num_bytes for stored in self._in_host)
        assert kept <= self.host_used <= self._host_bytes
        for stored in set(known) - set(self._lost):
            assert stored in self._in_host or self._is_only_on_disk(stored)
        assert self._in_host.keys() <= set(known), "an entry that nobody can find"
        unwritten = {s for s in self._in_host if self._disk is None or not self._disk.holds(s)}
        assert unwritten == self._unwritten.keys()
        assert self._unwritten_bytes == sum(stored.num_bytes for stored in unwritten)
        if self._disk is not None:
            self._disk.check()

    def close(self) -> None:
        """Frees everything and removes the files."""
        self._in_host.clear()
        if self._disk is not None:
            self._disk.close()

    def _put(
        self, num_bytes: int, first_page: int, read: Callable[[np.ndarray], None]
    ) -> Stored | None:
        if not self._make_room(num_bytes):
            return None
        buffer = self._memory.new_buffer(num_bytes)
        read(buffer)
        stored = Stored(self._next_number, num_bytes, first_page)
        self._next_number += 1
        self._in_host[stored] = buffer
        self._unwritten[stored] = None
        self._unwritten_bytes += num_bytes
        self.host_used += num_bytes
        return stored

    def _note_written(self, stored: Stored) -> None:
        """It is on disk as well, or not in host memory any more."""
        if stored in self._unwritten:
            del self._unwritten[stored]
            self._unwritten_bytes -= stored.num_bytes

    def _is_only_on_disk(self, stored: Stored) -> bool:
        return stored not in self._in_host and self._disk is not None and self._disk.holds(stored)

    def _make_room(self, num_bytes: int, keep: Collection[Stored] = ()) -> bool:
        """In host memory: what is on disk as well gives its buffer up, then others are lost."""
        if num_bytes > self._host_bytes:
            return False
        self.poll()
        for is_copied in (True, False):
            for stored in list(self._in_host):
                if self.host_used + num_bytes <= self._host_bytes:
                    return True
                is_moving = self._disk is not None and self._disk.is_moving(stored)
                if is_moving or stored in keep or is_copied == (stored in self._unwritten):
                    continue
                if is_copied:
                    del self._in_host[stored]
                    self.host_used -= stored.num_bytes
                else:
                    self._lose(stored)
        return self.host_used + num_bytes <= self._host_bytes

    def _write_ahead(self, disk: DiskTier) -> None:
        """Starts one write, if none runs."""
        if disk.is_writing or not self._can_write or self._unwritten_bytes <= self._write_above:
            return
        for stored in self._unwritten:
            if disk.fits(stored, beside=False):
                while not disk.fits(stored, beside=True) and (oldest := disk.oldest()):
                    self._lose(oldest)
                if disk.fits(stored, beside=True):
                    self._memory.wait()
                    disk.start_write(stored, self._in_host[stored])
                return

    def _start_read(self, stored: Stored, keep: Collection[Stored]) -> None:
        disk = self._disk
        if disk is None or not self._is_only_on_disk(stored) or disk.is_moving(stored):
            return
        if self._make_room(stored.num_bytes, keep):
            disk.start_read(stored, self._memory.new_buffer(stored.num_bytes))
            self.host_used += stored.num_bytes

    def _note(self, moved: Moved) -> None:
        stored, error = moved.stored, moved.error
        if error is not None and not isinstance(error, (OSError, CacheFileError)):
            raise error
        if moved.is_forgotten:
            self.host_used -= stored.num_bytes
        elif moved.is_write and error is not None:
            self._can_write = False
            _log.warning("the prefix cache goes on without writing to disk: %s", error)
        elif moved.is_write:
            self._note_written(stored)
        elif error is not None:
            _log.warning("a cached prefix is lost: %s", error)
            self.host_used -= stored.num_bytes
            self._lose(stored)
        else:
            self._in_host[stored] = moved.buffer

    def _lose(self, stored: Stored) -> None:
        self.forget(stored)
        self._lost.append(stored)
