"""Tensors in pieces: where a rank's part lies in the whole, and files that hold such parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import KeysView, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from perilune.core.errors import CheckpointError

PIECES = "pieces"
"""Key of a file's metadata: JSON, from a tensor's name to its `Region`."""


class Region(NamedTuple):
    """A block of a tensor of shape `whole`."""

    whole: tuple[int, ...]
    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def all(shape: tuple[int, ...]) -> Region:
        return Region(shape, (0,) * len(shape), shape)


def region_of(x: Tensor) -> Region:
    """Where this rank's part of x lies; all of it where x is not shared out."""
    if not isinstance(x, DTensor):
        return Region.all(tuple(x.shape))
    begin, shape = [0] * x.ndim, list(x.shape)
    for mesh_dim, placement in enumerate(x.placements):
        assert isinstance(placement, Shard), f"a checkpoint has no pieces for {placement}"
        dim, parts = placement.dim, x.device_mesh.size(mesh_dim)
        each = -(-shape[dim] // parts)
        first = min(each * x.device_mesh.get_local_rank(mesh_dim), shape[dim])
        begin[dim] += first
        shape[dim] = min(each, shape[dim] - first)
    assert tuple(shape) == tuple(x.to_local().shape), (shape, x.to_local().shape)
    return Region(tuple(x.shape), tuple(begin), tuple(shape))


def metadata_of(regions: Mapping[str, Region]) -> str:
    return msgspec.json.encode(regions).decode()


class PieceFiles:
    """The files of one state; use as a context.

    Raises:
        CheckpointError: a file is damaged, or one is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, str] = {}
        """Of all files together, but for the pieces."""
        self._pieces: dict[str, list[tuple[Any, Region]]] = defaultdict(list)
        self._by_parameter: dict[str, list[str]] = defaultdict(list)
        self._stack = ExitStack()

    def __enter__(self) -> PieceFiles:
        with ExitStack() as stack:
            for path in sorted(self.folder.glob("rank-*.safetensors")):
                try:
                    self._add(stack.enter_context(safe_open(path, framework="pt")))
                except SafetensorError as error:
                    raise CheckpointError(f"{path} is damaged: {error}") from None
            self._stack = stack.pop_all()
        for name in self._pieces:
            if name.startswith("optim."):
                self._by_parameter[name.split(".", 2)[2]].append(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _add(self, file: Any) -> None:
        metadata = dict(file.metadata() or {})
        regions = msgspec.json.decode(metadata.pop(PIECES, "{}"), type=dict[str, Region])
        self.metadata |= metadata
        for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            shape = tuple(file.get_slice(name).get_shape())
            self._pieces[name].append((file, regions.get(name, Region.all(shape))))

    @property
    def names(self) -> KeysView[str]:
        return self._pieces.keys()

    def keys_of(self, parameter: str) -> list[str]:
        """What the optimiser of a parameter remembers: `optim.<what>.<parameter>`."""
        return self._by_parameter.get(parameter, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._pieces[name][0][1].whole

    def read(self, name: str, wanted: Region) -> Tensor:
        """The block `wanted` of a tensor, from all files that have some of it."""
        found, filled = None, 0
        for file, piece in self._pieces[name]:
            own = _overlap(piece, wanted)
            if own is None:
                continue
            inside, into = own
            data = file.get_slice(name)[inside] if inside else file.get_tensor(name)
            if found is None:
                found = torch.empty(wanted.shape, dtype=data.dtype)
            found[into] = data
            filled += data.numel()
        if found is None and 0 in wanted.shape:
            return torch.empty(wanted.shape)
        if found is None or filled != found.numel():
            raise CheckpointError(f"{self.folder} is damaged: pieces of {name} are missing")
        return found


def _overlap(piece: Region, wanted: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Slices of the piece and of what is wanted; None where they do not meet."""
    inside, into = [], []
    for p_begin, p_len, w_begin, w_len in zip(
        piece.begin, piece.shape, wanted.begin, wanted.shape, strict=True
    ):
        first, stop = max(p_begin, w_begin), min(p_begin + p_len, w_begin + w_len)
        if first >= stop:
            return None
        inside.append(slice(first - p_begin, stop - p_begin))
        into.append(slice(first - w_begin, stop - w_begin))
    return tuple(inside), tuple(into)
