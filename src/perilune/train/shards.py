"""Token shards on disk: ids and document offsets of one kind and split, in files that are mapped.

`<split>_<kind>.bin` holds ids without a header (uint16, or uint32 for vocabularies above 65,536),
`.idx` int64 offsets of the documents (one more than there are documents). What does not fit goes on
in `<split>_<kind>.1.bin` and so on; no document lies in two files. `manifest.json` tells the
checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perilune.core.errors import ConfigError

MAX_TOKENS = 1 << 28
"""Of one file."""
MANIFEST = "manifest.json"


class Tokens:
    """Ids of several files as one array; a slice lies within one of them."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._parts = parts
        self._begins = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, wanted: slice) -> npt.NDArray[Any]:
        i = int(np.searchsorted(self._begins, wanted.start, "right")) - 1
        begin = self._begins[i]
        assert wanted.stop <= self._begins[i + 1], "a document lies in one file"
        return self._parts[i][wanted.start - begin : wanted.stop - begin]


class Shard(NamedTuple):
    tokens: npt.NDArray[Any] | Tokens
    offsets: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def join(documents: Sequence[npt.NDArray[Any]]) -> Shard:
    """One shard of the ids of these documents, in order."""
    lens = [len(ids) for ids in documents]
    offsets = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=offsets[1:])
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
    return Shard(tokens, offsets)


def save_shard(
    folder: Path, name: str, shard: Shard, *, max_tokens: int = MAX_TOKENS
) -> list[Path]:
    """Writes the files of `name` (`<split>_<kind>`); returns their paths. Only a document of more
    than `max_tokens` makes a file longer than that."""
    paths = []
    offsets, first, number = shard.offsets, 0, 0
    while first < shard.num_documents or number == 0:
        stop = int(np.searchsorted(offsets, offsets[first] + max_tokens, "right")) - 1
        stop = min(max(stop, first + 1), shard.num_documents)
        tokens = shard.tokens[int(offsets[first]) : int(offsets[stop])]
        own = (offsets[first : stop + 1] - offsets[first]).astype("<i8")
        little_endian = tokens.astype(tokens.dtype.newbyteorder("<"))
        for suffix, data in {"bin": little_endian, "idx": own}.items():
            paths.append(_path(folder, name, number, suffix))
            paths[-1].write_bytes(data.tobytes())
        first, number = stop, number + 1
    return paths


def load_shard(folder: Path, name: str) -> Shard:
    """Maps a shard's files.

    Raises:
        ConfigError: a file is missing, or two files do not belong together.
    """
    parts, offsets = [], [np.zeros(1, np.int64)]
    while not parts or _path(folder, name, len(parts), "idx").exists():
        own = _mapped(_path(folder, name, len(parts), "idx"), np.dtype("<i8"))
        path = _path(folder, name, len(parts), "bin")
        num_bytes = path.stat().st_size if path.exists() else 0
        num_tokens = int(own[-1]) if len(own) else -1
        wide = num_bytes == 4 * num_tokens and num_tokens > 0
        parts.append(_mapped(path, np.dtype("<u4" if wide else "<u2")))
        if len(parts[-1]) != num_tokens:
            raise ConfigError(f"the files of shard {name} in {folder} do not belong together")
        offsets.append(own[1:] + offsets[-1][-1])
    tokens = parts[0] if len(parts) == 1 else Tokens(parts)
    return Shard(tokens, np.concatenate(offsets))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ConfigError where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it tells checksums and the size of validation text")
    return json.loads(path.read_text(encoding="utf-8"))


def fingerprint(folder: Path) -> str:
    """What the manifest says of all shards, in 64 digits: other data have another."""
    shards = json.dumps(read_manifest(folder)["shards"], sort_keys=True)
    return hashlib.sha256(shards.encode()).hexdigest()


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Reads the files of these shards once, and compares them with the manifest's checksums.

    Raises:
        ConfigError: a file is missing or has changed, or the manifest does not know the shard.
    """
    shards = read_manifest(folder)["shards"]
    for name in names:
        if name not in shards:
            raise ConfigError(f"{folder / MANIFEST} does not know the shard {name}")
        for file, expected in shards[name]["files"].items():
            path = folder / file
            if not path.exists():
                raise ConfigError(f"shard file {path} is missing")
            with path.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != expected:
                raise ConfigError(f"{path} is not the file that {MANIFEST} describes")


def _path(folder: Path, name: str, number: int, suffix: str) -> Path:
    return folder / (f"{name}.{number}.{suffix}" if number else f"{name}.{suffix}")


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.exists():
        raise ConfigError(f"shard file {path} is missing")
    if path.stat().st_size < dtype.itemsize:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
