"""Validation loss in bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from perilune.model.model import Transformer
from perilune.train.data import IGNORED, Batch, BatchWriter, Piece, cut_pieces
from perilune.train.shards import Shard, load_shard, read_manifest
from perilune.train.step import DeviceBatch, LossFunction, batch_loss


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
    batches: list[Batch]


def held_out_sets(data_dir: Path, row_len: int, rows: int, pad_id: int) -> Iterator[HeldOut]:
    """Every validation shard that the manifest of `data_dir` names, packed in document order.

    A document longer than a row is cut; every piece is read without the pieces before it.

    Raises:
        ConfigError: there is no manifest, or a shard is missing.
    """
    shards = read_manifest(data_dir)["shards"]
    for name in sorted(name for name in shards if name.startswith("validation_")):
        shard, kind = load_shard(data_dir, name), name.removeprefix("validation_")
        if shard.num_documents:
            batches = list(packed_in_order(shard, row_len, rows, pad_id))
            yield HeldOut(kind, shards[name]["text_bytes"], batches)


def packed_in_order(shard: Shard, row_len: int, rows: int, pad_id: int) -> Iterator[Batch]:
    """Batches with every token of `shard` once; the last one is filled up with padding rows."""
    lines = _lines(shard, row_len)
    for first in range(0, len(lines), rows):
        writer = BatchWriter({"": shard}, rows, row_len, pad_id)
        for row, pieces in enumerate(lines[first : first + rows]):
            fill = 0
            for piece in pieces:
                writer.write(row, fill, piece)
                fill += piece.stop - piece.start
        yield writer.batch()


def _lines(shard: Shard, row_len: int) -> list[list[Piece]]:
    lines: list[list[Piece]] = []
    room = 0
    for start, stop, is_end in zip(*cut_pieces(shard.offsets, row_len, None), strict=True):
        if stop - start > room:
            lines.append([])
            room = row_len
        lines[-1].append(Piece("", int(start), int(stop), bool(is_end)))
        room -= int(stop - start)
    return lines


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Iterable[DeviceBatch], loss_fn: LossFunction = batch_loss
) -> Score:
    """Sum of -log p over every target in `batches`; `loss_fn` gives a batch's mean."""
    was_training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    for batch in batches:
        count = int((batch.targets_BL != IGNORED).sum())
        # Also without a target: other ranks may wait for this one in the model.
        loss = float(loss_fn(model, batch))
        if count:
            nats += loss * count
            tokens += count
    model.train(was_training)
    return Score(nats, tokens)
