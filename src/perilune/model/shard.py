"""One safetensors file: its header, read with suspicion, and the file, written in one stream.

Layout: 8 bytes little-endian header length; that many bytes of JSON, `{name: {dtype, shape,
data_offsets}}` with an optional `__metadata__` of strings; then the data without a gap.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from perilune.core.errors import CheckpointError

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library; the longest real header, K3's, has under 1 MB a shard."""
MAX_DIMENSIONS = 8
MAGIC = {
    b"PK\x03\x04": "a zip archive (a torch pickle is one)",
    **{bytes((0x80, protocol)): "a pickle" for protocol in range(2, 6)},
    b"GGUF": "a GGUF file",
}


class Entry(NamedTuple):
    """Where one tensor lies; offsets in bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, Entry]:
    """Name to place of every tensor in `path`. Reads the header alone.

    Raises:
        CheckpointError: the file is not safetensors, is truncated or padded, or a tensor's shape,
            dtype and offsets do not agree, overlap or leave a gap.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8), size)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    header = _parse_json(path, text)
    _check_metadata(path, header.pop("__metadata__", {}))
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries


def _header_length(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        other = next((what for magic, what in MAGIC.items() if head.startswith(magic)), None)
        if other is not None:
            raise CheckpointError(f"{path}: is {other}, not safetensors; it is not opened")
        raise CheckpointError(f"{path}: the header length field says {length} bytes: not plausible")
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: truncated: the header should have {length} bytes, {size - 8} follow"
        )
    return length


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object")
    return header


def _check_metadata(path: Path, metadata: object) -> None:
    ok = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if not ok:
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has the unknown dtype {short(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has the impossible shape {short(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the impossible offsets {short(offsets)}")
    begin, end = offsets
    needed = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise CheckpointError(
            f"{where}: shape {shape} of {dtype} needs {needed} bytes, not the {end - begin} "
            "that its offsets span"
        )
    return Entry(path, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_layout(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    """Tensors must follow each other without gap or overlap up to the end of the file."""
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.begin != start:
            problem = "overlaps the one before it" if entry.begin < start else "follows a gap"
            raise CheckpointError(
                f"{path}: tensor {name!r} {problem}: starts at byte {entry.begin}, not {start}"
            )
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end}, the file has {size}"
            )
        start = entry.end
    if start != size:
        raise CheckpointError(f"{path}: {size - start} bytes follow the last tensor")


class NewTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_shard(
    path: Path, tensors: Iterable[NewTensor], fetch: Callable[[str], bytes | memoryview]
) -> None:
    """Writes `path`, asking `fetch` for the little-endian bytes of one tensor at a time.

    Widest dtypes come first and the header is padded to 8 bytes, so that every tensor is aligned
    in a mapped file. The bytes depend on nothing but the arguments. The file is synced to disk.
    """
    ordered = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.num_bytes
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            data = fetch(tensor.name)
            assert len(data) == tensor.num_bytes, (tensor, len(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
