"""The layout that the Triton kernels ask for."""

from __future__ import annotations

from torch import Tensor


def row_major(x: Tensor) -> Tensor:
    """Rows, along the last axis, in one piece each. Other axes may be strided: a slice of a
    projection or of a cache goes in as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()
