"""Weights of `Transformer` to a checkpoint directory in the released layout.

Legend: E experts, O output rows, I input columns.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from perilune.core.errors import CheckpointError, ConfigError
from perilune.model.config import ModelConfig
from perilune.model.config_json import config_json
from perilune.model.model import Transformer
from perilune.model.mxfp4 import Packed, pack
from perilune.model.parse_config import parse_config
from perilune.model.shard import NewTensor, write_shard
from perilune.model.tensors import TensorSpec, text_tensors
from perilune.model.verify import INDEX, SINGLE

TORCH_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_SHARD_BYTES = 16_000_000_000
"""K3's release has 96 shards of about this size."""

Fetch = Callable[[TensorSpec], Tensor]


def save_checkpoint(
    model: Transformer,
    directory: str | Path,
    *,
    raw_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Sequence[Path] = (),
    overwrite: bool = False,
) -> None:
    """Writes `config.json`, the weights and copies of `extra_files` (tokenizer, card).

    Weights are cast to the configuration's dtype and routed experts packed as MXFP4 where it says
    so. The directory appears whole or not at all. `raw_config` is written in place of the one made
    from `model.config`, and must parse to the same sizes.

    Raises:
        ConfigError: `raw_config` is another model's.
        CheckpointError: `directory` exists and is not empty (without `overwrite`), or a weight is
            not finite.
    """
    raw = dict(raw_config) if raw_config is not None else config_json(model.config)
    config = parse_config(raw, "raw_config")
    if _sizes(config) != _sizes(model.config):
        raise ConfigError("raw_config describes another model than the one to be saved")
    state = StateSource(model.state_dict())
    write_checkpoint(
        directory,
        specs=list(text_tensors(config)),
        fetch=state.fetch,
        raw_config=raw,
        max_shard_bytes=max_shard_bytes,
        extra_files=extra_files,
        overwrite=overwrite,
    )


def _sizes(config: ModelConfig) -> ModelConfig:
    """`config` without what only concerns its files."""
    return replace(config, dtype="bfloat16", experts_mxfp4=False, has_vision=False, ignored_keys=())


class StateSource:
    """Tensors of a state dict in the form that the files hold."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.packer = Packer()

    def fetch(self, spec: TensorSpec) -> Tensor:
        value = self.state[spec.target].detach()
        if spec.expert is not None:
            value = value[spec.expert, spec.rows[0] : spec.rows[1]]
        if spec.kind in ("packed", "scale"):
            return self.packer.half(spec, value)
        return stored_form(spec, value)


class Packer:
    """Packs a matrix when its first half is asked for and keeps the second for the next call."""

    def __init__(self) -> None:
        self._name = ""
        self._packed: Packed | None = None

    def half(self, spec: TensorSpec, weight_OI: Tensor) -> Tensor:
        """The codes or the scales of `weight_OI`, as `spec` says.

        Raises:
            CheckpointError: a weight is not finite.
        """
        if self._packed is None or self._name != spec.matrix:
            try:
                self._packed = pack(weight_OI)
            except ValueError as error:
                raise CheckpointError(f"tensor {spec.matrix!r}: {error}") from None
            self._name = spec.matrix
        return self._packed.weight_packed if spec.kind == "packed" else self._packed.weight_scale


def stored_form(spec: TensorSpec, value: Tensor) -> Tensor:
    """`value` with the shape and dtype of `spec`; `A_log` gets its padding."""
    if spec.kind == "a_log" and len(spec.shape) == 1:
        flat = value.flatten()
        value = pad(flat, (0, spec.shape[0] - flat.numel()))
    return value.reshape(spec.shape).to(TORCH_DTYPE[spec.dtypes[0]])


def write_checkpoint(
    directory: str | Path,
    *,
    specs: Sequence[TensorSpec],
    fetch: Fetch,
    raw_config: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Sequence[Path] = (),
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Writes a whole checkpoint directory, holding one tensor at a time. Raises as above."""
    by_name = {spec.name: spec for spec in specs}
    shards = _split(specs, max_shard_bytes)
    bar = tqdm(total=len(specs), desc="write", unit="tensor", disable=not progress)

    def fetch_bytes(name: str) -> memoryview:
        bar.update()
        return _bytes_of(fetch(by_name[name]))

    with bar, _new_directory(Path(directory), overwrite) as target:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            name = SINGLE if len(shards) == 1 else name
            tensors = [NewTensor(s.name, s.dtypes[0], s.shape) for s in shard]
            write_shard(target / name, tensors, fetch_bytes)
            weight_map.update(dict.fromkeys((s.name for s in shard), name))
        if len(shards) > 1:
            total = sum(spec.num_bytes for spec in specs)
            _write_json(
                target / INDEX,
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            )
        _write_json(target / "config.json", raw_config)
        for path in extra_files:
            shutil.copyfile(path, target / path.name)


def _split(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `max_bytes` a shard unless one tensor alone is larger."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        # A packed matrix and its scales stay in one shard, where they are neighbours.
        if shards[-1] and size + spec.num_bytes > max_bytes and spec.kind != "scale":
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def _bytes_of(value: Tensor) -> memoryview:
    flat = value.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _new_directory(directory: Path, overwrite: bool) -> Iterator[Path]:
    """A hidden sibling that becomes `directory` when the block ends well, and vanishes if not."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} exists and is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise CheckpointError(f"{directory} exists and is not empty")
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.partial-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
        fresh = Path(scratch, "new")
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        _replace(directory, fresh, aside=Path(scratch, "old"))
        _sync(directory.parent)


def _replace(directory: Path, fresh: Path, aside: Path) -> None:
    if directory.is_dir():
        directory.rename(aside)
    try:
        fresh.rename(directory)
    except OSError:
        if aside.is_dir():
            aside.rename(directory)
        raise


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
