"""Runs the model on a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from perilune.engine.batch import Plan, pack, step_of
from perilune.engine.decode_graphs import DecodeGraphs
from perilune.engine.draft_graphs import DraftGraphs
from perilune.engine.flight import Flight, Results
from perilune.engine.lane import Lane
from perilune.engine.sampler import Sampled
from perilune.engine.step_model import StepModel, StepPools


class Runner:
    def __init__(
        self,
        model: StepModel,
        pools: StepPools,
        device: torch.device,
        lane: Lane,
        graphs: DecodeGraphs | None,
        draft_graphs: DraftGraphs | None = None,
    ) -> None:
        """`graphs`: for steps that only decode, `draft_graphs` for those that verify drafts; None:
        they run as the others do."""
        self._model = model
        self._pools = pools
        self._device = device
        self._lane = lane
        self._graphs = graphs
        self._draft_graphs = draft_graphs

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Starts a step that is not empty. Slots and pages of all chunks hold their tokens
        afterwards, those of cuts their states; what is enqueued later sees that. In a plan with
        drafts, slots of decoding chunks stay as they were until `read`."""
        graphs = self._draft_graphs if plan.width else self._graphs
        if graphs is not None and not plan.prefilling:
            return graphs.launch(plan)
        results = Results()
        step, token_ids_T = step_of(plan, self._pools), pack(plan, self._device)

        def run() -> None:
            if plan.width == 0:
                results.logits_RV = self._model.step(token_ids_T, self._pools, step)
            else:
                verified = self._model.verify(token_ids_T, self._pools, step)
                results.logits_RV = verified.logits_RV
                results.accept = partial(self._accept, verified, step)

        self._lane.run(run)
        return Flight(plan, self._lane.mark(), results)

    @torch.inference_mode()
    def read(self, flight: Flight) -> list[list[Sampled]]:
        """Of each chunk, the tokens that count, when the step has ended. Of drafts, those are what
        slots move on by."""
        taken = flight.read()
        if flight.plan.width:
            accept = flight.results.accept
            assert accept is not None
            accept([len(tokens) for tokens in taken[: len(flight.plan.decoding)]])
        return taken

    def _accept(self, verified: Any, step: Any, num_kept: Sequence[int]) -> None:
        keep_N = torch.tensor(num_kept, device=self._device)
        self._lane.run(lambda: self._model.accept(verified, self._pools, step, keep_N))
