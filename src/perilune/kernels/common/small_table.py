"""Numbers that a kernel looks up, made on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def small_table(
    numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """On the device, ready for what this stream runs next; the host does not wait for what it runs
    now. Never an inference tensor: it may be kept for calls that train."""
    with torch.inference_mode(False):
        table = torch.tensor(numbers, dtype=dtype)
        return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
