"""Runs the model on a plan.

Legend: R rows of logits, V vocabulary, N sequences that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.engine.batch import Plan, pack, step_of
from perilune.engine.step_model import StepModel, StepPools


class Ran(NamedTuple):
    logits_RV: Tensor
    """As `Plan.sampled` counts them."""
    verified: Any = None
    """What `Runner.accept` needs of a step with drafts."""


class Runner:
    def __init__(self, model: StepModel, pools: StepPools, device: torch.device) -> None:
        self._model = model
        self._pools = pools
        self._device = device

    @torch.inference_mode()
    def run(self, plan: Plan) -> Ran:
        """For a plan that is not empty; there may be no row.

        Slots and pages of all chunks hold their tokens afterwards, those of cuts their states. In a
        plan with drafts, slots of decoding chunks stay as they were until `accept`.
        """
        step = step_of(plan, self._pools)
        ids_T = pack(plan, self._device)
        if plan.width == 0:
            return Ran(self._model.step(ids_T, self._pools, step))
        verified = self._model.verify(ids_T, self._pools, step)
        return Ran(verified.logits_RV, (verified, step))

    @torch.inference_mode()
    def accept(self, ran: Ran, num_kept: Sequence[int]) -> None:
        """Says how many tokens of each decoding chunk of a plan with drafts count."""
        verified, step = ran.verified
        keep_N = torch.tensor(num_kept, device=self._device)
        self._model.accept(verified, self._pools, step, keep_N)
