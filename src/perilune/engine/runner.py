"""Runs the model on a plan.

Legend: B sampled sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.engine.batch import Plan, pack, step_of
from perilune.engine.step_model import StepModel, StepPools


class Runner:
    def __init__(self, model: StepModel, pools: StepPools, device: torch.device) -> None:
        self._model = model
        self._pools = pools
        self._device = device

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [B, V] of `plan.sampled`, for a plan that is not empty; B may be 0.

        Slots and pages of all chunks hold their tokens afterwards, those of cuts their states.
        """
        step = step_of(plan, self._pools)
        return self._model.step(pack(plan, self._device), self._pools, step)
