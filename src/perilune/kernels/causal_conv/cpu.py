"""One token of the short convolution as one loop.

Legend: N sequences, C channels, W taps.
"""

from __future__ import annotations

from torch import Tensor

from perilune.kernels.causal_conv import reference
from perilune.kernels.common.cpu_jit import jit, sigmoid
from perilune.kernels.common.few_tokens import few_tokens


def causal_conv_decode(x_NC: Tensor, weight_CW: Tensor, window_NWC: Tensor) -> Tensor:
    """As `reference.causal_conv_decode`."""
    if not few_tokens(x_NC) or not window_NWC.is_contiguous():
        return reference.causal_conv_decode(x_NC, weight_CW, window_NWC)
    y_NC = x_NC.new_empty(x_NC.shape)
    arrays = (x.numpy() for x in (x_NC.contiguous(), weight_CW.contiguous(), window_NWC, y_NC))
    _causal_conv_decode(*arrays)
    return y_NC


@jit
def _causal_conv_decode(x_NC, weight_CW, window_NWC, y_NC):
    channels, width = weight_CW.shape
    for n in range(x_NC.shape[0]):
        for c in range(channels):
            total = x_NC[n, c] * weight_CW[c, width - 1]
            for w in range(width - 1):
                total += window_NWC[n, w, c] * weight_CW[c, w]
            y_NC[n, c] = total * sigmoid(total)
        for w in range(width - 2):
            window_NWC[n, w] = window_NWC[n, w + 1]
        if width > 1:
            window_NWC[n, width - 2] = x_NC[n]
