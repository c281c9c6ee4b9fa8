"""Token shards on disk: ids and document offsets of one kind and split.

`<split>_<kind>.bin` holds uint16 ids without a header, `.idx` int64 offsets of the documents (one
more than there are documents).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perilune.core.errors import ConfigError

MAX_VOCAB = 1 << 16


class Shard(NamedTuple):
    tokens: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def join(documents: Sequence[npt.NDArray[np.uint16]]) -> Shard:
    """One shard of the ids of these documents, in order."""
    lens = [len(ids) for ids in documents]
    offsets = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=offsets[1:])
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
    return Shard(tokens, offsets)


def save_shard(folder: Path, name: str, shard: Shard) -> list[Path]:
    """Writes the two files of `name` (`<split>_<kind>`); returns their paths."""
    parts = {
        "bin": shard.tokens.astype("<u2").tobytes(),
        "idx": shard.offsets.astype("<i8").tobytes(),
    }
    paths = []
    for suffix, data in parts.items():
        paths.append(folder / f"{name}.{suffix}")
        paths[-1].write_bytes(data)
    return paths


def load_shard(folder: Path, name: str) -> Shard:
    """Reads a shard.

    Raises:
        ConfigError: a file is missing, or the two files do not belong together.
    """
    tokens = np.frombuffer(_read(folder / f"{name}.bin"), dtype="<u2")
    offsets = np.frombuffer(_read(folder / f"{name}.idx"), dtype="<i8")
    if len(offsets) == 0 or offsets[-1] != len(tokens):
        raise ConfigError(f"the files of shard {name} in {folder} do not belong together")
    return Shard(tokens, offsets)


def _read(path: Path) -> bytes:
    if not path.exists():
        raise ConfigError(f"shard file {path} is missing")
    return path.read_bytes()
