"""Validation loss in bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from perilune.model.model import Transformer
from perilune.train.step import Batch, batch_loss


class Score(NamedTuple):
    nats: float
    tokens: int

    def bits_per_byte(self, text_bytes: int) -> float:
        """Total code length over the bytes of the same text."""
        return self.nats / math.log(2) / text_bytes


@torch.inference_mode()
def evaluate(model: Transformer, batches: Iterable[Batch], loss_fn=batch_loss) -> Score:
    """Sum of -log p over every target in `batches`."""
    model.eval()
    nats, tokens = 0.0, 0
    for batch in batches:
        count = int((batch.targets_BL >= 0).sum())
        nats += float(loss_fn(model, batch)) * count
        tokens += count
    model.train()
    return Score(nats, tokens)
