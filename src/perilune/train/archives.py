"""Source archives: fetched once by the ordinary package clients, read in place afterwards."""

from __future__ import annotations

import hashlib
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from perilune.core.errors import PeriluneError


class ArchiveError(PeriluneError):
    """A package cannot be fetched or its archive cannot be read; the message names it."""


class ArchiveFile(NamedTuple):
    path: str
    data: bytes


def fetch_pypi(name: str, version: str, cache_dir: Path) -> Path:
    """The wheel (or source archive) of one PyPI package, without its dependencies."""
    stem = name.lower().replace("-", "_")
    found = _newest(cache_dir, (f"{stem}-{version}-*.whl", f"{stem}-{version}.tar.gz"))
    if found is not None:
        return found
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache_dir)]
    _run([*command, f"{name}=={version}"], name)
    found = _newest(cache_dir, (f"{stem}-{version}-*.whl", f"{stem}-{version}.tar.gz"))
    if found is None:
        raise ArchiveError(f"pip downloaded no archive of {name} {version} into {cache_dir}")
    return found


def fetch_debian(name: str, cache_dir: Path) -> Path:
    """The .deb of one Debian package, at the version that the machine's mirror offers."""
    found = _newest(cache_dir, (f"{name}_*.deb",))
    if found is not None:
        return found
    _run(["apt-get", "download", "-qq", name], name, cwd=cache_dir)
    found = _newest(cache_dir, (f"{name}_*.deb",))
    if found is None:
        raise ArchiveError(f"apt-get downloaded no archive of {name} into {cache_dir}")
    return found


def _newest(cache_dir: Path, patterns: tuple[str, ...]) -> Path | None:
    found = [path for pattern in patterns for path in cache_dir.glob(pattern)]
    return max(found, default=None)


def _run(command: list[str], name: str, cwd: Path | None = None) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArchiveError(f"{name} cannot be fetched: {last}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_archive(path: Path, wanted: Callable[[str], bool]) -> Iterator[ArchiveFile]:
    """The wanted files of a wheel, a tar archive or a .deb, in name order.

    Raises:
        ArchiveError: the kind of the archive is unknown, or a .deb holds no data member.
    """
    if path.suffix == ".whl":
        yield from _read_zip(path, wanted)
    elif path.suffix == ".deb":
        yield from _read_tar(io.BytesIO(_deb_data(path)), wanted)
    elif path.name.endswith(".tar.gz"):
        with path.open("rb") as file:
            yield from _read_tar(io.BytesIO(file.read()), wanted)
    else:
        raise ArchiveError(f"{path.name} is neither a wheel, a .tar.gz nor a .deb")


def _read_zip(path: Path, wanted: Callable[[str], bool]) -> Iterator[ArchiveFile]:
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if wanted(name):
                yield ArchiveFile(name, archive.read(name))


def _read_tar(data: io.BytesIO, wanted: Callable[[str], bool]) -> Iterator[ArchiveFile]:
    with tarfile.open(fileobj=data, mode="r:*") as archive:
        for member in sorted(archive.getmembers(), key=lambda item: item.name):
            if member.isfile() and wanted(member.name):
                file = archive.extractfile(member)
                assert file is not None
                yield ArchiveFile(member.name, file.read())


def _deb_data(path: Path) -> bytes:
    """The `data.tar` member of a .deb, decompressed when it is xz.

    A .deb is an `ar` archive: 8 magic bytes, then members with 60-byte headers, padded to even.
    """
    blob = path.read_bytes()
    position = 8
    while position + 60 <= len(blob):
        name = blob[position : position + 16].decode("ascii").strip().rstrip("/")
        size = int(blob[position + 48 : position + 58])
        body = blob[position + 60 : position + 60 + size]
        if name.startswith("data.tar"):
            return lzma.decompress(body) if name.endswith(".xz") else body
        position += 60 + size + size % 2
    raise ArchiveError(f"{path.name} holds no data.tar")
