"""Which packs are worth a plan of cuDNN's, which it builds for every new shape, in 40 to 70 ms.

The layers of one prompt repay it from 8,192 tokens on, and training has the same shape again and
again.
"""

from __future__ import annotations

from perilune.kernels.common.packing import Packing

MIN_TOKENS, MIN_TRAINED_TOKENS = 8192, 1024
"""Of a sequence, for calls that need no gradient and for those that do."""


def is_long(packing: Packing, keys: Packing | None, trains: bool) -> bool:
    """Whether they are sequences of one length that is not short, with no keys but their own."""
    causal = packing.segment_BL is None and (keys is None or keys.lengths == packing.lengths)
    least = MIN_TRAINED_TOKENS if trains else MIN_TOKENS
    return causal and packing.is_dense and packing.max_len >= least
