"""torch.compile of a whole training loss as one graph."""

from __future__ import annotations

import torch

from perilune.kernels.common.packing import Packing
from perilune.model.model import Transformer
from perilune.train.step import LossFunction, batch_loss


def compile_loss(model: Transformer, backend: str = "inductor") -> LossFunction:
    """`batch_loss` compiled for `model`; the first call takes minutes on a GPU."""
    _choose_backends(model)
    return torch.compile(batch_loss, dynamic=False, backend=backend)


@torch.no_grad()
def _choose_backends(model: Transformer) -> None:
    """Runs one token: ops import their backend in their first call, which no graph can hold."""
    was_training = model.training
    model.eval()
    model(torch.zeros(1, dtype=torch.int64, device=model.head_weight.device), Packing.of([1]))
    model.train(was_training)
