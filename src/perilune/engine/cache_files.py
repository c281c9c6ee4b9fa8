"""Files of the off-card tier: one an entry, checksummed, of no use to any other process.

A file is a header of fixed size and the bytes. The header names the process's run, the entry and
the length, and has a SHA-256 of all that and of the bytes: of what the standard library has it is
the fastest that two damaged files cannot share (crc32 is faster, but 32 bits). It is computed by
the thread that reads and writes.

Every run has a folder of its own and holds a lock in it; folders whose lock nobody holds are
leftovers, which the next run removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from perilune.core.errors import CheckpointError

_HEADER = struct.Struct("<8s16sQQ32s")
_MAGIC = b"PERICACH"
_SUFFIX = ".cache"


class CacheFileError(CheckpointError):
    """A file does not hold the entry that it should; the entry is then a miss."""


class CacheFiles:
    """`write`, `read` and `remove` may be called from any thread, for different entries at once."""

    def __init__(self, directory: Path) -> None:
        """Makes `directory` where it is missing, and removes leftovers in it.

        Raises:
            OSError: it cannot be made or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._run = secrets.token_bytes(16)
        self.folder = directory / f"run-{self._run.hex()}"
        with _lock(directory):  # others that start now wait, and find this run locked
            _remove_leftovers(directory)
            self.folder.mkdir()
            self._held = _lock(self.folder)

    def path(self, number: int) -> Path:
        return self.folder / f"{number}{_SUFFIX}"

    @staticmethod
    def file_bytes(num_bytes: int) -> int:
        return _HEADER.size + num_bytes

    def write(self, number: int, content: np.ndarray) -> None:
        """Under a temporary name first: a file is whole or not there. Raises OSError."""
        draft = self.path(number).with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.write(self._header(number, content))
                file.write(content.data)
            draft.replace(self.path(number))
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def read(self, number: int, out: np.ndarray) -> None:
        """Fills `out`.

        Raises:
            CacheFileError: cut short, too long, of another entry or run, or damaged.
            OSError: there is no file, or it cannot be read.
        """
        path = self.path(number)
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            is_whole = file.readinto(out.data) == len(out) and not file.read(1)
        if not is_whole or header != self._header(number, out):
            raise CacheFileError(f"{path} is damaged, or not the file of entry {number}")

    def remove(self, number: int) -> None:
        self.path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the run's files."""
        _remove_run(self.folder)
        self._held.close()

    def _header(self, number: int, content: np.ndarray) -> bytes:
        fields = _MAGIC, self._run, number, len(content)
        digest = hashlib.sha256(_HEADER.pack(*fields, b""))
        digest.update(content.data)
        return _HEADER.pack(*fields, digest.digest())


def _lock(folder: Path, *, wait: bool = True) -> BinaryIO:
    """Held until the file is closed or the process ends. Raises OSError instead of waiting."""
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        lock.close()
        raise
    return lock


def _remove_leftovers(directory: Path) -> None:
    for folder in directory.glob("run-*"):
        try:
            lock = _lock(folder, wait=False)
        except OSError:
            continue  # in use
        _remove_run(folder)
        lock.close()


def _remove_run(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (_SUFFIX, ".draft") or path.name == "lock":
            path.unlink(missing_ok=True)
    if not os.listdir(folder):
        folder.rmdir()
