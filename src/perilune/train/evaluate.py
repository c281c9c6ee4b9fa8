"""Validation loss in bits per byte of text.

Legend: B rows, L tokens of a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.model.model import Transformer
from perilune.train.data import IGNORED, cut_pieces
from perilune.train.shards import load_shard
from perilune.train.step import Batch


class Score(NamedTuple):
    nats: float
    tokens: int

    def bits_per_byte(self, text_bytes: int) -> float:
        """Total code length over the bytes of the same text."""
        return self.nats / math.log(2) / text_bytes


class HeldOut(NamedTuple):
    """One kind of validation text. A document's first token is given, not predicted."""

    kind: str
    text_bytes: int
    batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def held_out_sets(data_dir: Path, row_len: int, rows: int, pad_id: int) -> Iterator[HeldOut]:
    """Every validation shard of `data_dir`, packed into batches in document order.

    A document longer than a row is cut; every piece is read without the pieces before it.
    """
    manifest = json.loads((data_dir / "manifest.json").read_text(encoding="utf-8"))
    for name in sorted({path.name.split(".")[0] for path in data_dir.glob("validation_*.idx*")}):
        shard = load_shard(data_dir, name)
        if not shard.num_documents:
            continue
        table = cut_pieces(shard.offsets, row_len, None)
        packed = _pack(shard.tokens, table, row_len, rows, pad_id)
        entry = manifest["shards"][name]
        yield HeldOut(name.partition("_")[2], entry["text_bytes"], packed)


def _pack(tokens, table, row_len, rows, pad_id) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    lines: list[list[tuple[int, int, bool]]] = []
    room = 0
    for start, stop, is_end in zip(*table, strict=True):
        if stop - start > room:
            lines.append([])
            room = row_len
        lines[-1].append((int(start), int(stop), bool(is_end)))
        room -= int(stop - start)
    batches = []
    for first in range(0, len(lines), rows):
        ids = np.full((rows, row_len), pad_id, np.int64)
        targets = np.full((rows, row_len), IGNORED, np.int64)
        segments = np.zeros((rows, row_len), np.int64)
        for row, pieces in enumerate(lines[first : first + rows]):
            at = 0
            for number, (start, stop, is_end) in enumerate(pieces):
                length, known = stop - start, stop - start - is_end
                ids[row, at : at + length] = tokens[start:stop]
                targets[row, at : at + known] = tokens[start + 1 : start + 1 + known]
                at += length
                segments[row, at:] = number + 1
        batches.append((ids, targets, segments))
    return batches


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], loss_fn: Callable[..., Tensor]) -> Score:
    """Sum of -log p over every target in `batches`; `loss_fn` gives a batch's mean."""
    model.eval()
    nats, tokens = 0.0, 0
    for batch in batches:
        count = int((batch.targets_BL != IGNORED).sum())
        nats += float(loss_fn(model, batch)) * count
        tokens += count
    model.train()
    return Score(nats, tokens)
