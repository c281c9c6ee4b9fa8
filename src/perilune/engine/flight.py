"""A step that has been launched, and what comes of it.

Legend: R rows of logits, V vocabulary, B rows of a step without prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.acceptance import accepted
from perilune.engine.batch import Plan
from perilune.engine.lane import Work
from perilune.engine.sampler import NOT_FINITE, Sampled, sample


@dataclass(slots=True, kw_only=True)
class Results:
    """What a step leaves, once it has run."""

    logits_RV: Tensor | None = None
    """As `Plan.sampled` counts them; until the next step is launched."""
    accept: Callable[[Sequence[int]], None] | None = None
    """Of a step with drafts: moves states on by so many tokens of each decoding chunk."""
    token_B: Tensor | None = None
    """On the host: -1 where none could be sampled; None: they are still to be sampled."""
    on_host: Sequence[int] = ()
    """Rows that are to be sampled all the same."""


class Flight(NamedTuple):
    plan: Plan
    wait: Work
    """Returns when the results are there."""
    results: Results

    @torch.inference_mode()
    def read(self) -> list[list[Sampled]]:
        """Of each chunk, the tokens that count, when the step has ended."""
        self.wait()
        logits_RV, token_B = self.results.logits_RV, self.results.token_B
        assert logits_RV is not None
        if token_B is None:
            return _sample(self.plan, logits_RV)
        read = _read_drafted if self.plan.width else _read
        return read(self.plan, logits_RV, token_B, self.results.on_host)


def _sample(plan: Plan, logits_RV: Tensor) -> list[list[Sampled]]:
    rows = plan.sampled
    if len(rows) < len(logits_RV):
        logits_RV = logits_RV[torch.tensor([row.index for row in rows], device=logits_RV.device)]
    states = [row.chunk.sequence.sampling for row in rows]
    sampled = iter(sample(logits_RV, states, [row.ahead for row in rows] if plan.width else None))
    return [
        accepted(chunk, [*islice(sampled, 1 + chunk.num_drafted)]) if chunk.is_sampled else []
        for chunk in plan.chunks
    ]


def _read(
    plan: Plan, logits_BV: Tensor, token_B: Tensor, on_host: Sequence[int]
) -> list[list[Sampled]]:
    """Of a step in which each row has one token."""
    taken = [[_sampled(token_id)] for token_id in token_B.tolist()]
    if on_host:
        states = [plan.decoding[i].sequence.sampling for i in on_host]
        some_BV = logits_BV if len(states) == len(taken) else logits_BV[on_host]
        for i, each in zip(on_host, sample(some_BV, states), strict=True):
            taken[i] = [each]
    return taken


def _read_drafted(
    plan: Plan, logits_BV: Tensor, token_B: Tensor, on_host: Sequence[int]
) -> list[list[Sampled]]:
    """Of a step that verifies drafts."""
    sampled = [_sampled(token_id) for token_id in token_B.tolist()]
    if on_host:
        rows = [row for row in plan.sampled if row.index in on_host]
        states = [row.chunk.sequence.sampling for row in rows]
        some_BV = logits_BV[[row.index for row in rows]]
        for row, each in zip(rows, sample(some_BV, states, [r.ahead for r in rows]), strict=True):
            sampled[row.index] = each
    firsts = range(0, len(sampled), 1 + plan.width)
    return [
        accepted(chunk, sampled[first : first + 1 + chunk.num_drafted])
        for first, chunk in zip(firsts, plan.decoding, strict=True)
    ]


def _sampled(token_id: int) -> Sampled:
    return Sampled(token_id) if token_id >= 0 else Sampled(None, fault=NOT_FINITE)
