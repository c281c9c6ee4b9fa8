"""Re-saves a checkpoint with other storage types, tensor by tensor, without building the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from perilune.core.errors import CheckpointError, UnsupportedError
from perilune.model.load import TensorReader
from perilune.model.parse_config import parse_config
from perilune.model.presets import MXFP4_QUANTIZATION
from perilune.model.save import (
    MAX_SHARD_BYTES,
    TORCH_DTYPE,
    Packer,
    stored_form,
    write_checkpoint,
)
from perilune.model.tensors import TensorSpec, text_tensors
from perilune.model.verify import CheckpointReport, verify_checkpoint

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl")


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    experts: Literal["keep", "plain", "mxfp4"] = "keep",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> CheckpointReport:
    """Writes `source` to the new directory `target`; returns the verified result.

    Unchanged tensors (the vision tower's too) are copied byte for byte, and so are the other
    files beside the weights (tokenizer, card). `experts` unpacks or packs the routed experts;
    `dtype` is the storage of linear and norm weights.

    Raises:
        ConfigError, CheckpointError: `source` does not verify, or `target` is not empty.
        UnsupportedError: `dtype` is not one of the three that configurations know.
    """
    source = Path(source)
    report = verify_checkpoint(source, progress=progress)
    raw = _new_config(source, experts, dtype)
    config = parse_config(raw, str(source / "config.json"))
    vision = [_as_stored(report, name) for name in report.skipped]
    with TensorReader(report.entries) as reader:
        write_checkpoint(
            target,
            specs=[*text_tensors(config), *vision],
            fetch=_Converter(reader, config.kda.num_heads).fetch,
            raw_config=raw,
            max_shard_bytes=max_shard_bytes,
            extra_files=_other_files(source),
            progress=progress,
        )
    return verify_checkpoint(target)


def _new_config(source: Path, experts: str, dtype: str | None) -> dict[str, Any]:
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    nested = raw.get("text_config") if raw["model_type"] == "kimi_k3" else None
    parts = [raw] if nested is None else [raw, nested]
    if dtype is not None:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise UnsupportedError(f"dtype must be bfloat16, float16 or float32, not {dtype!r}")
        for part in parts:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    if experts != "keep":
        for part in parts:
            part.pop("quantization_config", None)
    if experts == "mxfp4":
        raw["quantization_config"] = MXFP4_QUANTIZATION
    return raw


def _as_stored(report: CheckpointReport, name: str) -> TensorSpec:
    entry = report.entries[name]
    if entry.dtype not in TORCH_DTYPE:
        raise CheckpointError(f"{entry.file}: vision tensor {name!r} has dtype {entry.dtype}")
    return TensorSpec(name, entry.shape, (entry.dtype,), "")


def _other_files(source: Path) -> list[Path]:
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHT_FILES)
    )


class _Converter:
    """Finds the tensor that a new spec asks for, unpacking or packing as needed."""

    def __init__(self, reader: TensorReader, num_heads: int) -> None:
        self.reader, self.num_heads = reader, num_heads
        self.packer = Packer()

    def fetch(self, spec: TensorSpec) -> Tensor:
        if spec.kind == "a_log":
            return stored_form(spec, self.reader.read_a_log(spec.name, self.num_heads))
        if spec.name in self.reader.entries:
            value = self.reader.read(spec.name)
            return value if spec.kind in ("packed", "scale") else stored_form(spec, value)
        if spec.kind in ("packed", "scale"):
            return self.packer.half(spec, self.reader.read(spec.matrix))
        return self.reader.read_expert(spec.name, TORCH_DTYPE[spec.dtypes[0]])
