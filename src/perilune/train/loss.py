"""Next-token cross entropy over packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Mean over the targets that are not `IGNORE`, in nats."""
    return torch.nn.functional.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE)
