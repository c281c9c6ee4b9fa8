"""Logits of what grammars forbid.

Legend: B rows, one a sequence; R rows that have a grammar; V vocabulary, W bytes for its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.sampling_state import SamplingState


class Masked(NamedTuple):
    logits_BV: Tensor
    """-inf at every token that the row's grammar forbids."""
    faults: dict[int, str]
    """Rows whose grammar cannot go on, and why; their logits are the model's own."""


def mask_forbidden(logits_BV: Tensor, states: Sequence[SamplingState]) -> Masked:
    """Without a grammar among `states`, `logits_BV` itself; else a copy.

    Adding keeps what is not finite: a NaN shows wherever in a row it stands.
    """
    rows: list[int] = []
    faults: dict[int, str] = {}
    bits = bytearray()
    for i, state in enumerate(states):
        if state.grammar is None:
            continue
        mask = state.grammar.allowed()
        if mask is None:
            faults[i] = state.grammar.fault or ""
        else:
            rows.append(i)
            bits += mask
    if not rows:
        return Masked(logits_BV, faults)
    bytes_RW = torch.frombuffer(bits, dtype=torch.uint8).view(len(rows), -1)
    added_RV = _added(bytes_RW.to(logits_BV.device), logits_BV.shape[1])
    rows_R = torch.tensor(rows, device=logits_BV.device)
    return Masked(logits_BV.index_add(0, rows_R, added_RV), faults)


def _added(bytes_RW: Tensor, vocab_size: int) -> Tensor:
    """[R, V]: 0 where the bit is set, -inf where it is not. By byte: one gather does it."""
    parts = _table_on(bytes_RW.device).index_select(0, bytes_RW.flatten().int())
    return parts.view(len(bytes_RW), -1)[:, :vocab_size]


@cache
def _table_on(device: torch.device) -> Tensor:
    """[256, 8]: what is added to 8 logits for each byte of a mask."""
    bytes_1 = torch.arange(256, device=device)[:, None]
    is_set = bytes_1 >> torch.arange(8, device=device) & 1
    return torch.where(is_set.bool(), 0.0, -torch.inf)
