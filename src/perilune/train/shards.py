"""Token shards on disk: ids, document offsets and loss mask of one kind and split.

`<split>_<kind>.bin` holds uint16 ids without a header, `.idx` int64 offsets of the documents (one
more than there are documents), `.mask` one bit a token (numpy's packbits order): 1 where an
assistant writes. Each may stand as `.xz` instead.
"""

from __future__ import annotations

import lzma
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
    loss_mask: npt.NDArray[np.bool_]

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


class EncodedDocument(NamedTuple):
    ids: npt.NDArray[np.uint16]
    loss_mask: npt.NDArray[np.bool_]
    """One a token: True where a model learns to write it."""


def join(documents: Sequence[EncodedDocument]) -> Shard:
    """One shard of these documents, in order."""
    lens = [len(document.ids) for document in documents]
    offsets = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=offsets[1:])
    if not documents:
        return Shard(np.zeros(0, np.uint16), offsets, np.zeros(0, bool))
    ids = np.concatenate([document.ids for document in documents])
    return Shard(ids, offsets, np.concatenate([document.loss_mask for document in documents]))


def save_shard(folder: Path, name: str, shard: Shard) -> list[Path]:
    """Writes the three files of `name` (`<split>_<kind>`); returns their paths."""
    parts = {
        "bin": shard.tokens.astype("<u2").tobytes(),
        "idx": shard.offsets.astype("<i8").tobytes(),
        "mask": np.packbits(shard.loss_mask).tobytes(),
    }
    paths = []
    for suffix, data in parts.items():
        paths.append(folder / f"{name}.{suffix}")
        paths[-1].write_bytes(data)
    return paths


def load_shard(folder: Path, name: str) -> Shard:
    """Reads a shard, decompressing files that stand as `.xz`.

    Raises:
        ConfigError: a file is missing, or the three files do not belong together.
    """
    tokens = np.frombuffer(_read(folder / f"{name}.bin"), dtype="<u2")
    offsets = np.frombuffer(_read(folder / f"{name}.idx"), dtype="<i8")
    bits = np.frombuffer(_read(folder / f"{name}.mask"), dtype=np.uint8)
    if len(offsets) == 0 or offsets[-1] != len(tokens) or len(bits) != -(-len(tokens) // 8):
        raise ConfigError(f"the files of shard {name} in {folder} do not belong together")
    return Shard(tokens, offsets, np.unpackbits(bits, count=len(tokens)).astype(bool))


def _read(path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    packed = path.with_name(path.name + ".xz")
    if not packed.exists():
        raise ConfigError(f"shard file {path} is missing (neither it nor {packed.name} is there)")
    return lzma.decompress(packed.read_bytes())
