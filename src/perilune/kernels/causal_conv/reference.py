"""Short depthwise causal convolution followed by SiLU (K3: width 4, no bias, fp32 weights).

Legend: T packed tokens, B rows, L tokens of a row, N sequences, C channels, W taps. Tap W-1
multiplies the current token; before a document's first token everything is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing


class ConvOut(NamedTuple):
    y_TC: Tensor
    window_NWC: Tensor | None
    """The last W-1 inputs of each sequence, oldest first; None for segmented rows."""


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, packing: Packing, window_NWC: Tensor | None = None
) -> ConvOut:
    """y_t = silu(sum_j weight[:, j] * x[t - (W-1) + j]), in fp32, returned in the dtype of x."""
    taps = weight_CW.shape[1] - 1
    dtype = torch.promote_types(torch.float32, x_TC.dtype)
    rows_BLC = packing.to_rows(x_TC).to(dtype)
    if window_NWC is None:
        window_NWC = rows_BLC.new_zeros(rows_BLC.shape[0], taps, rows_BLC.shape[2])
    padded = torch.cat([window_NWC.to(dtype), rows_BLC], dim=1)
    length = rows_BLC.shape[1]
    weight_WC = weight_CW.to(dtype).t()
    y_BLC = weight_WC[taps] * rows_BLC
    for back in range(1, taps + 1):
        shifted = padded[:, taps - back : taps - back + length]
        if packing.segment_BL is not None:
            shifted = shifted * _same_document(packing.segment_BL, back)[..., None]
        y_BLC = y_BLC + weight_WC[taps - back] * shifted
    y_TC = packing.from_rows(torch.nn.functional.silu(y_BLC)).to(x_TC.dtype)
    if packing.segment_BL is not None:
        return ConvOut(y_TC, None)
    ends = [padded[i, n : n + taps] for i, n in enumerate(packing.lengths)]
    return ConvOut(y_TC, torch.stack(ends))


def _same_document(segment_BL: Tensor, back: int) -> Tensor:
    """1.0 where the token `back` places earlier exists in the row and belongs to the document."""
    begins_BL = torch.ones_like(segment_BL, dtype=torch.bool)
    begins_BL[:, 1:] = segment_BL[:, 1:] != segment_BL[:, :-1]
    # A number may come back after another document.
    document_BL = begins_BL.cumsum(1)
    same = torch.zeros_like(segment_BL, dtype=torch.bool)
    same[:, back:] = document_BL[:, back:] == document_BL[:, :-back]
    return same


def causal_conv_decode(x_NC: Tensor, weight_CW: Tensor, window_NWC: Tensor) -> Tensor:
    """One token of N sequences. Mutates `window_NWC`; returns silu(conv) [N, C]."""
    full_NWC = torch.cat([window_NWC, x_NC[:, None].to(window_NWC.dtype)], dim=1)
    window_NWC.copy_(full_NWC[:, 1:])
    y_NC = (full_NWC * weight_CW.t()).sum(1)
    return torch.nn.functional.silu(y_NC).to(x_NC.dtype)
