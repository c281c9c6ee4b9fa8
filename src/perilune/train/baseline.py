"""What general compressors make of the validation text: the card's comparison in bits per byte."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import NamedTuple

import zstandard

from perilune.train.document import KINDS


class Baseline(NamedTuple):
    kind: str
    text_bytes: int
    xz_bits_per_byte: float
    """`xz -9e`."""
    zstd_bits_per_byte: float
    """`zstd -19`."""


def measure(kind: str, text: bytes) -> Baseline:
    """Each compressor sees the whole text of the kind at once, without any training text."""
    xz = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    zstd = len(zstandard.ZstdCompressor(level=19).compress(text))
    return Baseline(kind, len(text), 8 * xz / len(text), 8 * zstd / len(text))


def measure_all(data_dir: Path) -> list[Baseline]:
    """One row for each `validation_<kind>.txt` that holds text."""
    texts = {kind: (data_dir / f"validation_{kind}.txt").read_bytes() for kind in KINDS}
    return [measure(kind, text) for kind, text in texts.items() if text]
