"""Graphs of a model that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.engine.decode_buffers import HostBuffer
from perilune.engine.decode_graphs import Capacity, DecodeGraphs
from perilune.engine.draft_buffers import Shape
from perilune.engine.draft_graphs import DraftGraphs, Graphs
from perilune.engine.lane import Lane, Work
from perilune.engine.leader import SharedModel, SharedPools, all_or_none
from perilune.engine.rank_wire import (
    AcceptDrafts,
    Capture,
    CaptureDrafts,
    NewDraftGraphs,
    NewGraphs,
    Replay,
    ReplayDrafts,
)
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

    def for_drafts(self) -> SharedDraftGraphs:
        model, pools = self._model, self._pools
        assert isinstance(model, SharedModel)
        assert isinstance(pools, SharedPools)
        return SharedDraftGraphs(model, pools, *self._capacity, self._place, self._lane)

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


class SharedDraftGraphs(DraftGraphs):
    """The same of steps that verify drafts."""

    def __init__(
        self,
        model: SharedModel,
        pools: SharedPools,
        most: int,
        num_pages: int,
        device: torch.device,
        lane: Lane,
    ) -> None:
        self._others = model.others
        with all_or_none():
            self._others.tell(NewDraftGraphs())
            super().__init__(model, pools, most, num_pages, device, lane)

    def graphs(self, shape: Shape) -> Graphs:
        with all_or_none():
            if shape not in self._graphs:
                self._others.tell(CaptureDrafts(*shape))
            return super().graphs(shape)

    def _enqueue(self, shape: Shape) -> Work:
        with all_or_none():
            self.graphs(shape)  # the others may have to capture them first
            _, width, _ = self._host.loaded
            self._others.tell(ReplayDrafts(*shape, width, self._host.integers()))
            return super()._enqueue(shape)

    def accept(self, shape: Shape, num_kept: Sequence[int]) -> None:
        with all_or_none():
            self._others.tell(AcceptDrafts(*shape, [*num_kept]))
            super().accept(shape, num_kept)
