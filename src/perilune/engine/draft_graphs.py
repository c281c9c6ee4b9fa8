"""Steps that verify drafts, captured once for each of a few shapes, then replayed.

Every sequence has as many tokens as the shape says; what its draft is short of is filled up with
tokens of which none counts. As without a graph, a step only reads the states: when the host knows
how many tokens of each sequence count, a second graph moves the states on by those, of what the
first one has left for it. Nothing runs on the device between the two that could write over that.

Legend: N sequences, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.engine.batch import Plan, Row
from perilune.engine.draft_buffers import DeviceDrafts, HostDrafts, Shape, Sizes
from perilune.engine.flight import Flight, Results
from perilune.engine.lane import Lane, Work
from perilune.engine.sampler import take_likeliest
from perilune.engine.speculation import MAX_ROWS
from perilune.engine.step_model import StepModel, StepPools

WIDTHS = (3, 7)
"""Drafted tokens of each sequence. With the token that is fed anyway rows are powers of two."""


def shapes(most: int) -> list[Shape]:
    """For steps of up to `most` sequences, as far as `MAX_ROWS` allow; the smallest ones first."""
    counts = [n for n in (1, 2, 4, 8) if n < 2 * most]
    found = [Shape(n, 1 + width) for n in counts for width in WIDTHS]
    return sorted((shape for shape in found if shape.rows <= MAX_ROWS), key=lambda s: s.rows)


class Graphs(NamedTuple):
    verify: Work
    accept: Work


class DraftGraphs:
    """Captures what is missing when it is wanted: `warm_up` does it for all."""

    def __init__(
        self,
        model: StepModel,
        pools: StepPools,
        most: int,
        num_pages: int,
        device: torch.device,
        lane: Lane,
    ) -> None:
        """`most`: sequences of a step; `num_pages`: of one sequence."""
        self._model = model
        self._pools = pools
        self._lane = lane
        self._shapes = shapes(most)
        sequences = max(shape.sequences for shape in self._shapes)
        sizes = Sizes(sequences, self._shapes[-1].rows, num_pages)
        self._device = DeviceDrafts(sizes, device)
        self._host = HostDrafts(sizes, device.type == "cuda")
        self._graphs: dict[Shape, Graphs] = {}
        self._logits_RV: Tensor | None = None
        self._verified: Any = None
        """What the step verified last has left for `accept`."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures all graphs, the largest first: the others do with its memory. No step may be in
        flight."""
        for shape in reversed(self._shapes):
            self.graphs(shape)

    def launch(self, plan: Plan) -> Flight:
        """Enqueues a step without prompts whose width is one of `WIDTHS`. Raises ValueError as
        `HostDrafts.fill` does."""
        count, each = len(plan.decoding), 1 + plan.width
        shape = next(s for s in self._shapes if s.each == each and s.sequences >= count)
        host = self._host
        host.is_free()
        host.fill(plan.decoding, shape, self._model.page_len)
        done, num_rows = self._enqueue(shape), count * each
        assert self._logits_RV is not None
        results = Results(
            logits_RV=self._logits_RV[:num_rows],
            token_B=host.out_R[:num_rows],
            on_host=[row.index for row in plan.sampled if not _is_likeliest(row)],
            accept=partial(self.accept, shape),
        )
        return Flight(plan, done, results)

    def replay(self, shape: Shape, width: int, integers: bytes) -> None:
        """Enqueues the step that another's `HostDrafts` was filled for."""
        self._host.is_free()
        self._host.load(shape.sequences, width, integers)
        self._enqueue(shape)

    def accept(self, shape: Shape, num_kept: Sequence[int]) -> None:
        """Enqueues that so many tokens of each sequence count in the step before."""
        host = self._host
        host.is_free()
        host.keep(num_kept)
        _, accept = self.graphs(shape)
        self._lane.run(lambda: self._run_accept(accept))
        host.is_free = self._lane.mark()

    def _run_accept(self, accept: Work) -> None:
        self._device.take_kept(self._host)
        accept()

    def _enqueue(self, shape: Shape) -> Work:
        """Waits, when it is called, for that step."""
        verify, _ = self.graphs(shape)
        self._lane.run(lambda: self._run_verify(verify, shape.rows))
        done = self._host.is_free = self._lane.mark()
        return done

    def _run_verify(self, verify: Work, num_rows: int) -> None:
        self._device.take(self._host)
        verify()
        self._host.out_R[:num_rows].copy_(self._device.out_R[:num_rows], non_blocking=True)

    def graphs(self, shape: Shape) -> Graphs:
        """Captured if they are not yet."""
        if shape not in self._graphs:
            self._lane.run(self._device.rest)  # capturing runs the step
            on, (n, _), num_rows = self._device, shape, shape.rows
            of_rows = (on.slot_N[:n], on.table_NJ[:n], on.length_N[:n], on.row_R[:num_rows])
            step = self._pools.decode_step(*of_rows, on.none_N[:n])
            # The second one is captured while what the first one leaves is held: so their memory
            # is not the same.
            self._graphs[shape] = Graphs(
                self._lane.capture(lambda: self._verify(step, num_rows)),
                self._lane.capture(lambda: self._accept(step, n)),
            )
        return self._graphs[shape]

    def _verify(self, step: Any, num_rows: int) -> None:
        on = self._device
        self._verified = self._model.verify(on.id_R[:num_rows], self._pools, step)
        logits_RV = self._verified.logits_RV
        take_likeliest(logits_RV, on.out_R[:num_rows], on.out_R[:num_rows])
        if self._logits_RV is None:
            self._logits_RV = logits_RV.new_empty(len(on.out_R), logits_RV.shape[1])
        self._logits_RV[:num_rows].copy_(logits_RV)

    def _accept(self, step: Any, n: int) -> None:
        self._model.accept(self._verified, self._pools, step, self._device.keep_N[:n])


def _is_likeliest(row: Row) -> bool:
    sampling = row.chunk.sequence.sampling
    return sampling.is_plain and not sampling.is_drawn
