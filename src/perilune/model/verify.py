"""Checks a checkpoint directory against its configuration by headers alone; loads nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from perilune.core.errors import CheckpointError
from perilune.model.config import ModelConfig
from perilune.model.parse_config import load_config
from perilune.model.shard import Entry, read_header
from perilune.model.tensors import VISION_NAME, text_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_INDEX_BYTES = 500_000_000
MAX_MISSING = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint that passed holds."""

    config: ModelConfig
    files: tuple[Path, ...]
    entries: dict[str, Entry]
    """Every tensor of the files by name."""
    skipped: tuple[str, ...]
    """Vision tensors: known by name, never loaded."""
    notes: tuple[str, ...]
    """Oddities that do no harm."""

    @property
    def num_tensors(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        """Of tensor data, headers not counted: `total_size` of the index."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def skipped_bytes(self) -> int:
        return sum(self.entries[name].num_bytes for name in self.skipped)


@dataclass(frozen=True, slots=True)
class _Index:
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None
    """Tensor to file name; None for a single file."""
    total_size: int | None = None


def verify_checkpoint(directory: str | Path, *, progress: bool = False) -> CheckpointReport:
    """Reads `config.json`, the index and every header.

    Raises:
        ConfigError: `config.json` is missing or wrong.
        CheckpointError: a file is missing, truncated or not safetensors; a tensor is missing,
            surplus, in two files, of another shape or dtype, or not where the index says.
    """
    directory = Path(directory)
    config = load_config(directory)
    index = _find_files(directory)
    entries: dict[str, Entry] = {}
    for path in tqdm(index.files, desc="headers", leave=False, disable=not progress):
        for name, entry in read_header(path).items():
            if name in entries:
                first = entries[name].file.name
                raise CheckpointError(f"{path}: tensor {name!r} is already in {first}")
            entries[name] = entry
    notes = _check_index(directory, index, entries)
    skipped = _check_tensors(directory, config, entries)
    if config.has_vision and not skipped:
        notes.append("config.json has a vision_config, but there is no vision tensor")
    return CheckpointReport(
        config=config,
        files=index.files,
        entries=entries,
        skipped=skipped,
        notes=tuple(notes),
    )


def _find_files(directory: Path) -> _Index:
    try:
        found = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from None
    shards = [name for name in found if name.endswith(".safetensors")]
    if INDEX in found:
        index = _read_index(directory / INDEX)
        extra = sorted(set(shards) - {path.name for path in index.files})
        if extra:
            raise CheckpointError(f"{directory / extra[0]}: not named by {INDEX}")
        return index
    if SINGLE in shards:
        if len(shards) > 1:
            raise CheckpointError(f"{directory} holds several safetensors files but no {INDEX}")
        return _Index((directory / SINGLE,), None)
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles and not shards:
        raise CheckpointError(
            f"{directory / pickles[0]}: only safetensors is read; a pickle can run code when opened"
        )
    raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}")


def _read_index(path: Path) -> _Index:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: is not a regular file")
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes: not a plausible index")
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensors to files")
    for tensor, name in weight_map.items():
        _check_file_name(path, tensor, name)
    files = tuple(path.parent / name for name in sorted(set(weight_map.values())))
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: named by {INDEX} but missing")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return _Index(files, weight_map, int(total) if isinstance(total, int) else None)


def _check_file_name(index: Path, tensor: str, name: object) -> None:
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{index}: tensor {tensor!r}: {name!r} is not a plain file name")
    if name.endswith(PICKLES):
        raise CheckpointError(
            f"{index}: tensor {tensor!r} lies in {name!r}: only safetensors is read, never a pickle"
        )
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: tensor {tensor!r}: {name!r} is not a safetensors file")


def _check_index(directory: Path, index: _Index, entries: dict[str, Entry]) -> list[str]:
    """The index and the files must name the same tensors; returns notes."""
    if index.weight_map is None:
        return []
    where = directory / INDEX
    for name, entry in entries.items():
        said = index.weight_map.get(name)
        if said is None:
            raise CheckpointError(f"{where}: tensor {name!r} of {entry.file.name} is not listed")
        if said != entry.file.name:
            raise CheckpointError(
                f"{where}: tensor {name!r} is in {entry.file.name}, the index says {said}"
            )
    for name, said in index.weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{directory / said}: tensor {name!r} of the index is not in it")
    total = sum(entry.num_bytes for entry in entries.values())
    if index.total_size not in (None, total):
        return [f"{INDEX} says total_size {index.total_size}, the tensors have {total} bytes"]
    return []


def _check_tensors(
    directory: Path, config: ModelConfig, entries: dict[str, Entry]
) -> tuple[str, ...]:
    """Every tensor of the configuration exactly once, and no other; returns the vision tensors."""
    expected: set[str] = set()
    missing: list[str] = []
    for spec in text_tensors(config):
        expected.add(spec.name)
        entry = entries.get(spec.name)
        if entry is None:
            missing.append(spec.name)
            if len(missing) > MAX_MISSING:  # the config is another model's: no use going on
                break
            continue
        where = f"{entry.file}: tensor {spec.name!r}"
        if not spec.fits(entry.shape, config.kda.num_heads):
            raise CheckpointError(
                f"{where} has shape {list(entry.shape)}; config.json makes it {list(spec.shape)}"
            )
        if entry.dtype not in spec.dtypes:
            wanted = " or ".join(spec.dtypes)
            raise CheckpointError(f"{where} has dtype {entry.dtype}; expected {wanted}")
    surplus = [name for name in entries if name not in expected]
    vision = config.family == "kimi_k3"
    unknown = [name for name in surplus if not (vision and VISION_NAME.match(name))]
    if missing:
        count = f"{len(missing) - 1}" if len(missing) <= MAX_MISSING else f"over {MAX_MISSING}"
        more = f" and {count} more" if len(missing) > 1 else ""
        hint = f"; unknown ones are present, such as {unknown[0]!r}" if unknown else ""
        raise CheckpointError(f"{directory}: tensor {missing[0]!r}{more} missing{hint}")
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        file = entries[unknown[0]].file
        raise CheckpointError(f"{file}: tensor {unknown[0]!r}{more} unknown to config.json")
    return tuple(surplus)
