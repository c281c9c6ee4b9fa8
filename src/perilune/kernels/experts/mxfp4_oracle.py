"""Every weight looked up bit by bit, then one token and one expert at a time. For conformance only.

Legend: E experts, O output rows, I input columns; MKW tiles as in `tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.experts import oracle

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BITS = {
    (0, 0): (15, 8, 7, 6),
    (8, 0): (3, 28, 27, 26),
    (0, 8): (9, 2, 1, 0),
    (8, 8): (13, 14, 5, 4),
}
"""(row, column) of a block of 16 by 16, each below 8 or not -> where sign and magnitude of an even
column's code lie in their word; those of the odd column are 16 bits away."""


def experts_mxfp4(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_EMKW: Tensor,
    w2_EMKW: Tensor,
    wide: bool,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    width, inner = x_TL.shape[1], w13_EMKW.shape[1] * 32
    channel = torch.arange(inner)
    gate = channel // 8 * 16 + channel % 8
    w13_E2IL = _weights(w13_EMKW, torch.cat([gate, gate + 8]), torch.arange(width))
    w2_ELI = _weights(w2_EMKW, torch.arange(width), channel)
    w13_E2IL, w2_ELI = (w.to(x_TL) for w in (w13_E2IL, w2_ELI))
    return oracle.experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)


def _weights(tiles_EMKW: Tensor, row_O: Tensor, column_I: Tensor) -> Tensor:
    """float64 [E, O, I]."""
    o, i = (x.to(tiles_EMKW.device) for x in (row_O[:, None], column_I))
    words, tile = tiles_EMKW.long(), (slice(None), o // 64, i // 128)
    thread = o // 16 % 4 * 32 + o % 8 * 4 + i // 2 % 4
    word = words[*tile, (i // 64 % 2 * 128 + thread) * 4 + i // 16 % 4]
    code = torch.zeros_like(word)
    for (second_row, second_column), places in _BITS.items():
        here = (o // 8 % 2 * 8 == second_row) & (i // 8 % 2 * 8 == second_column)
        bits = [word >> (place + 16 * (i % 2)) % 32 & 1 for place in places]
        found = bits[0] << 3 | bits[1] << 2 | bits[2] << 1 | bits[3]
        code = torch.where(here, found, code)
    byte = i // 32 % 2 * 2 + o // 8 % 2
    scale_word = words[*tile, 1024 + (o // 16 % 4 * 8 + o % 8) * 2 + i // 64 % 2]
    scale = scale_word >> (8 * byte) & 255
    magnitude = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=code.device)[code & 7]
    value = torch.where(code > 7, -magnitude, magnitude)
    return value * torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
