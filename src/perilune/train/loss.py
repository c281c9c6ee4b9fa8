"""Next-token cross entropy over packed rows.

Legend: T packed tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from perilune.model.model import Transformer
from perilune.train.data import IGNORED


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Mean over the targets that are not `IGNORED`, in nats."""
    return functional.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED)


def head_loss(model: Transformer, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
    """Final norm, head in fp32 and cross entropy: one region for a compiler to fuse."""
    weight_VD = model.head_weight.to(hidden_TD.dtype)
    return cross_entropy(
        functional.linear(model.model.norm(hidden_TD), weight_VD).float(), targets_T
    )
