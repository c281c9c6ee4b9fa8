"""Small constant tensors, made once. A Python number in an op costs more than the op on few tokens."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(value: float | tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """`value` as a CPU tensor that may take part in autograd. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)
