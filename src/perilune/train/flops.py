"""What a training step computes, by arithmetic, and what a device could: model FLOPs utilisation.

Counted is what the model needs, forward and backward, not what an implementation does: nothing that
is recomputed, no padding, attention only where documents let it look. KDA counts as its recurrence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from perilune.model.config import ModelConfig
from perilune.model.sizes import count_parameters
from perilune.train.data import PADDING, Batch

_PEAK_BF16 = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "B200": 2250e12}
"""Dense tensor-core peaks from the makers' data sheets, of the SXM forms."""
_WITH_BACKWARD = 3
"""A backward pass has two products for each one of the forward pass."""


class ModelFlops(NamedTuple):
    per_token: int
    per_pair: int
    """Of a token and one that it attends to, itself among them; over all MLA layers."""

    def of(self, batch: Batch) -> int:
        tokens, pairs = tokens_and_pairs(batch)
        return tokens * self.per_token + pairs * self.per_pair


def model_flops(config: ModelConfig) -> ModelFlops:
    """Of training: 2 a multiplied parameter and token, 3 x for both passes."""
    kda, mla, num_mla = config.kda, config.mla, len(config.mla_layers)
    # Decay; S'^T k, k e^T and S^T q with a multiplication and an addition each.
    state = kda.num_heads * kda.head_dim**2 * (1 + 3 * 2)
    per_token = 2 * count_parameters(config).activated + (config.num_layers - num_mla) * state
    per_pair = num_mla * 2 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim)
    return ModelFlops(_WITH_BACKWARD * per_token, _WITH_BACKWARD * per_pair)


def tokens_and_pairs(batch: Batch) -> tuple[int, int]:
    """Tokens that are no padding, and how many tokens they see in all."""
    tokens = pairs = 0
    for segments_L in batch.segments_BL:
        lens = np.bincount(segments_L[segments_L != PADDING]).astype(np.int64)
        tokens += int(lens.sum())
        pairs += int((lens * (lens + 1) // 2).sum())
    return tokens, pairs


def peak_flops(device: str, dtype: str) -> float | None:
    """Of one device in a second; None where it is not known: a CPU, fp32, an unlisted GPU."""
    if not device.startswith("cuda") or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)
