"""Graphs of a model that several ranks share."""

from __future__ import annotations

import torch

from perilune.engine.decode_buffers import HostBuffer
from perilune.engine.decode_graphs import Capacity, DecodeGraphs
from perilune.engine.lane import Lane, Work
from perilune.engine.leader import SharedModel, SharedPools, all_or_none
from perilune.engine.rank_wire import Capture, NewGraphs, Replay
from perilune.engine.sampling_state import SamplingState


class SharedGraphs(DecodeGraphs):
    """Graphs of the first rank; the others capture and replay theirs when it does."""

    def __init__(
        self,
        model: SharedModel,
        pools: SharedPools,
        capacity: Capacity,
        device: torch.device,
        lane: Lane,
    ) -> None:
        self._others = model.others
        with all_or_none():
            self._others.tell(NewGraphs(*capacity))
            super().__init__(model, pools, capacity, device, lane)

    def samples(self, state: SamplingState) -> bool:
        """Sums of probabilities may differ in their last bit from rank to rank: none is drawn."""
        return state.is_plain and not state.is_drawn

    def graph(self, n: int) -> Work:
        with all_or_none():
            if n not in self._graphs:
                self._others.tell(Capture(n))
            return super().graph(n)

    def _enqueue(self, graph: Work, buffer: HostBuffer, count: int) -> Work:
        rows, width, _ = buffer.loaded
        with all_or_none():
            self._others.tell(Replay(rows, width, buffer.integers()))
            return super()._enqueue(graph, buffer, count)
