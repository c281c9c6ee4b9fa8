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

        Extends the caches of all chunks. Decoding goes in a call of its own: with one token a
        sequence the model takes its recurrent path, which is far cheaper than a mixed call.
        """
        parts = []
        if plan.decode:
            parts.append(self._forward(plan.decode))
        if plan.prefill:
            logits_NV = self._forward(plan.prefill)
            parts.append(logits_NV[[i for i, c in enumerate(plan.prefill) if c.is_sampled]])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        batch = pack(chunks, self._device)
        return self._model(batch.token_ids_T, batch.packing, batch.caches, last_only=True)
