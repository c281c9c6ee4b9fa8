"""Checkpoint files to the weights of `Transformer`.

Legend: H heads, E experts, O output rows, I input columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from perilune.core.errors import CheckpointError
from perilune.model.config import ModelConfig
from perilune.model.model import Transformer
from perilune.model.mxfp4 import Packed, require_numbers, unpack
from perilune.model.packed_experts import Packer
from perilune.model.ranks import ALONE, Ranks
from perilune.model.shard import Entry
from perilune.model.tensors import TensorSpec, text_tensors
from perilune.model.verify import CheckpointReport, verify_checkpoint


class Part(NamedTuple):
    """Of a tensor: some of its rows, or columns."""

    dim: int
    first: int
    end: int


class Loaded(NamedTuple):
    model: Transformer
    report: CheckpointReport


class TensorReader:
    """Reads single tensors of verified files through memory maps. Close it, or use `with`."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor as stored, or a part of it, of which nothing else is read: maybe a view of the
        map, to be copied before the file may change.

        Raises:
            CheckpointError: the file can no longer be read as it was verified.
        """
        path = self.entries[name].file
        try:
            if path not in self._files:
                opened = safe_open(path, framework="pt")
                self._files[path] = self._stack.enter_context(opened)
            if part is None:
                return self._files[path].get_tensor(name)
            before = (slice(None),) * part.dim
            return self._files[path].get_slice(name)[*before, part.first : part.end]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r}: {error}") from None

    def read_expert(self, name: str, dtype: torch.dtype) -> Tensor:
        """The matrix [O, I] stored as `name` + `_packed` and `_scale`, unpacked to `dtype`."""
        return unpack(self.read_packed(name), dtype)

    def read_packed(self, name: str) -> Packed:
        """The same as it is stored.

        Raises:
            CheckpointError: also if a scale is not a number.
        """
        packed = Packed(self.read(f"{name}_packed"), self.read(f"{name}_scale"))
        try:
            require_numbers(packed)
        except CheckpointError as error:
            file = self.entries[f"{name}_scale"].file
            raise CheckpointError(f"{file}: tensor {name + '_scale'!r}: {error}") from None
        return packed

    def read_a_log(self, name: str, num_heads: int) -> Tensor:
        """One value a head [H], cut from the padding, which must be zeros."""
        stored = self.read(name).flatten()
        if bool(stored[num_heads:].count_nonzero()):
            raise CheckpointError(
                f"{self.entries[name].file}: tensor {name!r}: the padding after {num_heads} heads "
                "is not zero"
            )
        return stored[:num_heads]


def load_checkpoint(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    keep_packed: bool = False,
    progress: bool = False,
    ranks: Ranks = ALONE,
) -> Loaded:
    """Verifies `directory`, then builds the model with its weights, in training form.

    Weights take `dtype`, except those the released model keeps in fp32. MXFP4 experts are
    unpacked; with `keep_packed` they stay what they are, for inference alone. Vision tensors are
    skipped and listed in the report. Peak memory is the model plus one tensor. Of `ranks`, each
    reads its own part alone.

    Raises:
        ConfigError, CheckpointError: as `verify_checkpoint`, or a value is corrupt, or the ranks
            cannot have equal parts.
    """
    report = verify_checkpoint(directory, progress=progress)
    device = torch.device(device)
    with torch.device("meta"):
        model = Transformer(report.config, ranks)
    packer = packer_for(report.config, ranks, device) if keep_packed else None
    state = read_state(report, model, device=device, dtype=dtype, packer=packer, progress=progress)
    for name, module in ({} if packer is None else packer.modules()).items():
        model.set_submodule(name, module)
        state |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    model.load_state_dict(state, strict=True, assign=True)
    return Loaded(model, report)


def packer_for(config: ModelConfig, ranks: Ranks, device: torch.device) -> Packer | None:
    """None where no expert is stored as MXFP4."""
    if config.moe is None or not config.experts_mxfp4:
        return None
    return Packer(ranks.part(config.moe.num_experts), device)


def read_state(
    report: CheckpointReport,
    model: Transformer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    packer: Packer | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """The state dict of `model`, in memory of its own, without what `packer` takes; only the shapes
    of `model` are looked at."""
    state: dict[str, Tensor] = {}
    moe, ranks = report.config.moe, model.ranks
    own = ranks.part(moe.num_experts) if moe is not None else range(0)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    specs = tqdm(text_tensors(report.config), desc="weights", leave=False, disable=not progress)
    with TensorReader(report.entries) as reader:
        for spec in specs:
            if spec.kind == "scale":
                continue  # read together with its packed weights
            if spec.expert is None:
                value = _read_plain(reader, spec, report.config, shapes[spec.target], ranks)
                kept = torch.float32 if spec.kind in ("exact", "a_log") else dtype
                state[spec.target] = value.to(device=device, dtype=kept, copy=True)
            elif spec.expert not in own:
                continue
            elif packer is not None:
                packer.add(spec, reader.read_packed(spec.matrix))
            else:
                if spec.target not in state:
                    shape = shapes[spec.target]
                    state[spec.target] = torch.empty(shape, device=device, dtype=dtype)
                stack_OI = state[spec.target][own.index(spec.expert)]
                stack_OI[slice(*spec.rows)] = _read_expert(reader, spec, dtype).to(device)
    return state


def _read_plain(
    reader: TensorReader, spec: TensorSpec, config: ModelConfig, shape: torch.Size, ranks: Ranks
) -> Tensor:
    if spec.kind == "a_log":
        heads = ranks.part(config.kda.num_heads)
        return reader.read_a_log(spec.name, config.kda.num_heads)[heads.start : heads.stop]
    return reader.read(spec.name, part_of(spec.shape, shape, ranks))


def part_of(stored: Sequence[int], held: Sequence[int], ranks: Ranks) -> Part | None:
    """Which part a rank reads of a tensor: what it holds says which axis is shared out. None: all
    of it."""
    shared = [dim for dim, sizes in enumerate(zip(stored, held, strict=True)) if len({*sizes}) > 1]
    if not shared:
        return None
    [dim] = shared
    own = ranks.part(stored[dim])
    assert len(own) == held[dim], (stored, held, ranks)
    return Part(dim, own.start, own.stop)


def _read_expert(reader: TensorReader, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    if spec.kind == "packed":
        return reader.read_expert(spec.matrix, dtype)
    return reader.read(spec.name)
