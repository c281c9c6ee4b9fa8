"""Runs the model on a plan."""

from __future__ import annotations

import torch

from perilune.engine.batch import Plan, pack, step_of
from perilune.engine.decode_graphs import DecodeGraphs
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
    ) -> None:
        """`graphs`: for steps that only decode; None: they run as the others do."""
        self._model = model
        self._pools = pools
        self._device = device
        self._lane = lane
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Starts a step that is not empty. Slots and pages of all chunks hold their tokens
        afterwards, those of cuts their states; what is enqueued later sees that. In a plan with
        drafts, slots of decoding chunks stay as they were until `read`."""
        if self._graphs is not None and not plan.prefilling and plan.width == 0:
            return self._graphs.launch(plan)
        results = Results()
        step, token_ids_T = step_of(plan, self._pools), pack(plan, self._device)

        def run() -> None:
            if plan.width == 0:
                results.logits_RV = self._model.step(token_ids_T, self._pools, step)
            else:
                verified = self._model.verify(token_ids_T, self._pools, step)
                results.logits_RV, results.verified = verified.logits_RV, (verified, step)

        self._lane.run(run)
        return Flight(plan, self._lane.mark(), results)

    @torch.inference_mode()
    def read(self, flight: Flight) -> list[list[Sampled]]:
        """Of each chunk, the tokens that count, when the step has ended. Of drafts, those are what
        slots move on by."""
        taken = flight.read()
        if flight.plan.width:
            verified, step = flight.results.verified
            num_kept = [len(tokens) for tokens in taken[: len(flight.plan.decoding)]]
            keep_N = torch.tensor(num_kept, device=self._device)
            self._lane.run(lambda: self._model.accept(verified, self._pools, step, keep_N))
        return taken
