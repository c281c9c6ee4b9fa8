"""What many sequences leave behind, side by side, for a step of one token each.

Legend: N sequences, S slots, H heads, K key width, V value width, W conv width, C channels,
P pages, B tokens of a page, J pages of the longest sequence.

A sequence owns a slot in every KDA layer's pool and, in every MLA layer's, the pages that its row
of the table names. Layers read and write the pools in place: nothing is gathered or copied, and a
captured graph stays valid while the numbers in `Step` change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.model.config import ModelConfig

PAGE = 64
"""Tokens of a page of latents."""


class Step(NamedTuple):
    """Where the sequences of a step are, on the device."""

    slot_N: Tensor
    """int64 slots of the state pools; negative: a padded row, which changes nothing."""
    table_NJ: Tensor
    """int32 pages of each sequence, in the order of its tokens."""
    length_N: Tensor
    """int32 tokens of each sequence, that of this step included; 0: a padded row."""
    row_N: Tensor
    """int64 row, counted through all pages, of this step's token."""

    @staticmethod
    def of(slot_N: Tensor, table_NJ: Tensor, length_N: Tensor) -> Step:
        """Finds the rows. Those of padded rows are in page 0, which no sequence may own."""
        last_N = (length_N - 1).clamp_min(0).long()
        page_N = table_NJ.gather(1, (last_N // PAGE)[:, None])[:, 0].long()
        page_N = torch.where(length_N > 0, page_N, 0)
        return Step(slot_N, table_NJ, length_N, page_N * PAGE + last_N % PAGE)


class StatePool(NamedTuple):
    """Of one KDA layer."""

    state_SHKV: Tensor
    window_SWC: Tensor


class LatentPool(NamedTuple):
    """Of one MLA layer."""

    rows_PBC: Tensor

    def write(self, rows_NC: Tensor, step: Step) -> None:
        """Each sequence's newest row."""
        self.rows_PBC.view(-1, rows_NC.shape[1]).index_copy_(0, step.row_N, rows_NC)


class Pooled(NamedTuple):
    """A layer's pool, and where the step's sequences are in it."""

    pool: StatePool | LatentPool
    step: Step


@dataclass(frozen=True, slots=True)
class Pools:
    """Of all layers."""

    layers: list[StatePool | LatentPool]
    step: Step

    def of(self, layer: int) -> Pooled:
        return Pooled(self.layers[layer], self.step)


def state_pool(
    config: ModelConfig, slots: int, device: torch.device, dtype: torch.dtype
) -> StatePool:
    """Empty states in fp32 and windows in `dtype`."""
    kda = config.kda
    heads, width = kda.num_heads, kda.head_dim
    state = torch.zeros(slots, heads, width, width, device=device)
    channels = 3 * heads * width
    return StatePool(
        state, torch.zeros(slots, kda.conv_width - 1, channels, device=device, dtype=dtype)
    )


def latent_pool(
    config: ModelConfig, pages: int, device: torch.device, dtype: torch.dtype
) -> LatentPool:
    """Page 0 is for padded rows."""
    return LatentPool(torch.zeros(pages, PAGE, config.mla.cache_width, device=device, dtype=dtype))
