"""The convolution as its definition reads: one token, one tap at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.causal_conv.reference import ConvOut
from perilune.kernels.common.packing import Packing


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, packing: Packing, window_NWC: Tensor | None = None
) -> ConvOut:
    taps = weight_CW.shape[1] - 1
    outputs, windows = [], []
    for n, x_LC in enumerate(x_TC.split(packing.lengths)):
        zeros = [x_LC.new_zeros(x_LC.shape[1])] * taps
        history = zeros if window_NWC is None else list(window_NWC[n])
        for t, x_C in enumerate(x_LC):
            if packing.segment_BL is not None and t:
                row = packing.segment_BL[n]
                if row[t] != row[t - 1]:
                    history = zeros
            history = [*history, x_C]
            y_C = torch.stack([weight_CW[:, j] * history[j] for j in range(taps + 1)]).sum(0)
            outputs.append(y_C * torch.sigmoid(y_C))
            history = history[1:]
        windows.append(torch.stack(history))
    window = None if packing.segment_BL is not None else torch.stack(windows)
    return ConvOut(torch.stack(outputs) if outputs else x_TC[:0], window)
