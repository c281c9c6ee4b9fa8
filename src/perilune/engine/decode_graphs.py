"""Steps that only decode, captured once for each of a few numbers of rows, then replayed.

A replayed step costs the host some integers, one copy of them and one launch. The graph takes its
tokens from the host or from what the step before has sampled, runs the model, and takes the
likeliest token of every row; behind it, rows of a temperature are drawn. Those that want more have
their logits. What a running step reads or writes is its own: there are two sets of host buffers,
and whoever wants one that is in use waits.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.batch import Plan
from perilune.engine.decode_buffers import DeviceBuffers, HostBuffer, PageTables
from perilune.engine.draft_graphs import DraftGraphs
from perilune.engine.flight import Flight, Results
from perilune.engine.lane import Lane, Work
from perilune.engine.sampler import draw, take_likeliest
from perilune.engine.sampling_state import SamplingState
from perilune.engine.step_model import StepModel, StepPools


def row_counts(most: int) -> list[int]:
    """Rows that graphs are captured for, up to `most`: few more than any number of sequences."""
    steps = chain((1, 2, 4), range(8, 64, 8), range(64, 128, 16), range(128, most, 32))
    return [count for count in steps if count < most] + [most]


class Capacity(NamedTuple):
    rows: int
    """Sequences of a step."""
    pages: int
    """Of one sequence."""


class DecodeGraphs:
    """Captures what is missing when it is wanted: `warm_up` does it for all."""

    def __init__(
        self,
        model: StepModel,
        pools: StepPools,
        capacity: Capacity,
        device: torch.device,
        lane: Lane,
    ) -> None:
        self._model = model
        self._pools = pools
        self._capacity = capacity
        self._place = device
        self._lane = lane
        self._counts = row_counts(capacity.rows)
        self._device = DeviceBuffers(*capacity, device)
        self._tables = PageTables(*capacity, model.page_len)
        pinned = device.type == "cuda"
        self._buffers = [HostBuffer(*capacity, pinned) for _ in range(2)]
        self._graphs: dict[int, Work] = {}
        self._logits_NV: Tensor | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures all graphs, the largest first: the others do with its memory. No step may be in
        flight."""
        for count in reversed(self._counts):
            self.graph(count)

    def for_drafts(self) -> DraftGraphs:
        """Graphs of steps that verify, on the same pools."""
        return DraftGraphs(self._model, self._pools, *self._capacity, self._place, self._lane)

    def launch(self, plan: Plan) -> Flight:
        """Enqueues a step without prompts. Raises ValueError as `HostBuffer.fill` does."""
        count = len(plan.decoding)
        n = next(each for each in self._counts if each >= count)
        graph, buffer = self.graph(n), self._free_buffer()
        on_host, drawn = [], []
        for i, chunk in enumerate(plan.decoding):
            state = chunk.sequence.sampling
            if not self.samples(state):
                on_host.append(i)
            elif state.is_drawn:
                drawn.append(i)
        buffer.fill(plan.decoding, n, self._tables, drawn)
        done = self._enqueue(graph, buffer, count)
        assert self._logits_NV is not None
        results = Results(
            logits_RV=self._logits_NV[:count], token_B=buffer.out_N[:count], on_host=on_host
        )
        return Flight(plan, done, results)

    def samples(self, state: SamplingState) -> bool:
        """Whether the device takes the tokens of such a sequence, without a word to the host."""
        return state.is_plain

    def replay(self, n: int, width: int, integers: bytes) -> None:
        """Enqueues the step that another's `HostBuffer` was filled for."""
        buffer = self._free_buffer()
        buffer.load(n, width, integers)
        self._enqueue(self.graph(n), buffer, n)

    def _free_buffer(self) -> HostBuffer:
        buffer = self._buffers[0]
        self._buffers.reverse()
        buffer.is_free()
        return buffer

    def _enqueue(self, graph: Work, buffer: HostBuffer, count: int) -> Work:
        """Waits, when it is called, for that step."""
        self._lane.run(lambda: self._run(graph, buffer, count))
        done = buffer.is_free = self._lane.mark()
        return done

    def _run(self, graph: Work, buffer: HostBuffer, count: int) -> None:
        self._device.take(buffer)
        graph()
        if buffer.draws:
            on, n = self._device, buffer.loaded[0]
            assert self._logits_NV is not None
            rows = (x[:n] for x in (on.temperature_N, on.uniform_N, on.sampled_N, on.out_N))
            draw(self._logits_NV[:n], *rows)
        buffer.out_N[:count].copy_(self._device.out_N[:count], non_blocking=True)

    def graph(self, n: int) -> Work:
        """Of `n` rows, captured if it is not yet."""
        if n not in self._graphs:
            # Capturing runs the step, and what the one before has sampled is still wanted.
            self._lane.run(self._device.rest)
            self._graphs[n] = self._lane.capture(self._step_of(n))
            self._lane.run(self._device.resume)
        return self._graphs[n]

    def _step_of(self, n: int) -> Work:
        on = self._device
        rows = (x[:n] for x in (on.slot_N, on.table_NJ, on.length_N, on.row_N))
        step = self._pools.decode_step(*rows)

        def run() -> None:
            token_id_N = on.known_2N.index_select(0, on.source_N[:n])
            logits_NV = self._model.step(token_id_N, self._pools, step)
            take_likeliest(logits_NV, on.sampled_N[:n], on.out_N[:n])
            if self._logits_NV is None:
                self._logits_NV = logits_NV.new_empty(self._counts[-1], logits_NV.shape[1])
            self._logits_NV[:n].copy_(logits_NV)

        return run
