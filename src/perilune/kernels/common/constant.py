"""Small constant tensors, made once: on few tokens a Python number costs more than its op."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(value: float | tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """`value` as a CPU tensor that may take part in autograd. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)
