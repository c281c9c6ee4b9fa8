"""Quantisation-aware training of the experts: the forward sees MXFP4, the update fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.model.mxfp4 import fake_quantize
from perilune.train.whole_blocks import own_part


class QuantiseFrom:
    """Straight-through MXFP4 of expert weights, off until `switch_on`.

    The switch is a tensor, so that a compiled step serves both halves of a run.
    """

    def __init__(self, device: str) -> None:
        self.on = torch.zeros((), device=device)

    def __call__(self, weight_EOI: Tensor) -> Tensor:
        weight_EOI = own_part(weight_EOI)
        return torch.where(self.on > 0, fake_quantize(weight_EOI), weight_EOI)

    def switch_on(self) -> None:
        self.on.fill_(1.0)
