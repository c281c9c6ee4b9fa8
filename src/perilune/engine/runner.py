"""Runs the model on a plan.

Legend: B sampled sequences, N sequences of one model call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.engine.batch import Chunk, pack
from perilune.engine.scheduler import Plan
from perilune.engine.step_model import StepModel


class Runner:
    def __init__(self, model: StepModel, device: torch.device) -> None:
        self._model = model
        self._device = device

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [B, V] of `plan.sampled`, for a plan that is not empty; B may be 0.

        Extends the caches of all chunks.
        """
        parts = [self._forward(call) for call in plan.calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, call: Sequence[Chunk]) -> Tensor:
        batch = pack(call, self._device)
        logits_NV = self._model(batch.token_ids_T, batch.packing, batch.caches, last_only=True)
        rows = [i for i, chunk in enumerate(call) if chunk.is_sampled]
        return logits_NV if len(rows) == len(call) else logits_NV[rows]
