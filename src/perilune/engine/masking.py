"""Logits of what grammars forbid.

Legend: B rows, one a sequence; R rows that have a grammar; V vocabulary, W words of 32 bits of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    masked_BV = logits_BV.clone()
    bits_RW = torch.frombuffer(bits, dtype=torch.int32).view(len(rows), -1)
    masked_BV[rows] += _forbidden(bits_RW.to(logits_BV.device), logits_BV.shape[1])
    return Masked(masked_BV, faults)


def _forbidden(bits_RW: Tensor, vocab_size: int) -> Tensor:
    """[R, V]: 0 where the bit is set, -inf where it is not."""
    places = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    allowed_RV = ((bits_RW[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size]
    return torch.where(allowed_RV.bool(), 0.0, -torch.inf)
