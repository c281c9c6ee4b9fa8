"""From a declared case to rows of the result file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from perilune.kernels.bench.ambient import ambient, changed
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.contender import Contender
from perilune.kernels.bench.environment import gpu_id
from perilune.kernels.bench.errors import DishonestError
from perilune.kernels.bench.floors import Floor, data_sheet, floor, is_suspicious
from perilune.kernels.bench.gpu_state import Clocks, Sampler, summary
from perilune.kernels.bench.peers import Ready, ready
from perilune.kernels.bench.results import Row
from perilune.kernels.bench.rounds import Measured, Settings, Spread, measure
from perilune.kernels.bench.stopwatch import Stopwatch
from perilune.kernels.bench.subject import Chosen, Subject, choose, require_green, subject
from perilune.kernels.bench.verify import Errors, verify
from perilune.kernels.registry import spec

LEAST_REPEAT = 0.75
"""Time on values just seen over time on new ones. An honest op gains nothing from a repetition,
but for what a busy machine does in between."""

LONGEST_S = 8.0
"""A measurement that took so long is not made again for a clock that moved: its row says so."""


class Steady(NamedTuple):
    measured: Measured
    clocks: Clocks | None


@dataclass(frozen=True, kw_only=True)
class Bencher:
    """Measures case after case on one device."""

    device: torch.device
    device_name: str
    stopwatch: Stopwatch
    settings: Settings
    ceilings: Ceilings
    date: str
    commit: str | None
    _green: set[tuple[str, str]] = field(default_factory=set)

    def choose(self, op: str, backend: str | None) -> Chosen:
        """The implementation that will be timed, its conformance proven.

        Raises:
            RefusedError: it is red, or not declared.
        """
        chosen = choose(spec(op), self.device.type, backend)
        if (op, chosen.backend) not in self._green:
            require_green(spec(op), chosen.backend)
            self._green.add((op, chosen.backend))
        return chosen

    def verified(self, op: str, case: str, backend: str | None) -> Subject:
        """A case that may be timed: its op is green, and what is timed computes the truth.

        Raises:
            RefusedError: the message says why not.
        """
        chosen = self.choose(op, backend)
        timed = subject(spec(op), case, chosen, self.device, self.stopwatch, self.settings)
        # Twice: what was remembered of the first time is wrong the second.
        for _ in range(2):
            self.errors(timed)
        return timed

    def rows(self, op: str, case: str, backend: str | None = None) -> list[Row]:
        """One row a peer, or one without.

        Raises:
            RefusedError: the time would say nothing; the message says why.
        """
        state = ambient()
        timed = self.verified(op, case, backend)
        peers = [ready(peer, timed.case, timed.copies, timed.truth) for peer in timed.case.peers]
        contenders = _contenders(timed, peers)
        steady = self.steady(timed, contenders)
        errors = self.errors(timed)
        touched = changed(state, ambient())
        if touched:
            raise DishonestError(f"{timed.what}: changed global state: {', '.join(touched)}")
        spreads = dict(zip(map(id, contenders), steady.measured.spreads, strict=True))
        ours = spreads[id(timed.main)]
        limits = self.limits(timed)
        suspicious = is_suspicious(ours.median, limits, timed.what)
        base = Row(
            op=op,
            case=case,
            backend=timed.backend,
            median_ms=1e3 * ours.median,
            p10_ms=1e3 * ours.p10,
            p90_ms=1e3 * ours.p90,
            floor_ms=1e3 * limits.measured_s,
            inside=timed.declared.inside,
            eager_ms=None if timed.main is timed.eager else 1e3 * spreads[id(timed.eager)].median,
            error=errors.outputs,
            gradient_error=errors.gradients,
            marks=_marks(timed, suspicious, steady.clocks),
            clocks=_as_lists(steady.clocks),
            commit=self.commit,
            date=self.date,
        )
        return [_beside(base, peer, spreads) for peer in peers] or [base]

    def steady(self, timed: Subject, contenders: list[Contender]) -> Steady:
        """Measured again while the GPU's clock moves or repetitions seem to be cheaper.

        Raises:
            DishonestError: less work is done on values that were seen before.
            ImpossibleTimeError: two clocks disagree.
        """
        start = time.perf_counter()
        steady = self._once(timed, contenders)
        for _ in range(self.settings.attempts - 1):
            moved = steady.clocks is not None and steady.clocks.moved
            late = time.perf_counter() - start > LONGEST_S
            if steady.measured.repeat >= LEAST_REPEAT and (late or not moved):
                break
            steady = self._once(timed, contenders)
        if steady.measured.repeat < LEAST_REPEAT:
            raise DishonestError(
                f"{timed.what}: takes {steady.measured.repeat:.2f} of its time on values that it"
                " has just seen: it does less work when its input repeats"
            )
        return steady

    def _once(self, timed: Subject, contenders: list[Contender]) -> Steady:
        with Sampler(gpu_id(self.device)) as sampler:
            measured = measure(contenders, timed.copies.refresh, self.stopwatch, self.settings)
        return Steady(measured, summary(sampler.states))

    def limits(self, timed: Subject) -> Floor:
        work = timed.declared.work(timed.copies.copies[0], timed.case.backward)
        sheet = data_sheet(self.device_name, self.device.type, self.ceilings)
        return floor(work, sheet, self.ceilings)

    def errors(self, timed: Subject) -> Errors:
        """The worse of the graph's and the eager call's, on new values.

        Raises:
            DishonestError: they are wrong, late, or an input was changed.
        """
        contenders = {id(each): each for each in (timed.main, timed.eager)}.values()
        found = [verify(each, timed.copies, timed.truth, timed.what) for each in contenders]
        gradients = [each.gradients for each in found if each.gradients is not None]
        outputs = [each.outputs for each in found if each.outputs is not None]
        return Errors(max(outputs, default=None), max(gradients, default=None))


def _contenders(timed: Subject, peers: list[Ready]) -> list[Contender]:
    own = [timed.main] if timed.main is timed.eager else [timed.main, timed.eager]
    return [*own, *(peer.contender for peer in peers if peer.contender is not None)]


def _marks(timed: Subject, suspicious: bool, clocks: Clocks | None) -> list[str]:
    excerpt = timed.truth.excerpt
    compared = [excerpt.said] if excerpt is not None and excerpt.said else []
    moved = [f"clock moved: {clocks}"] if clocks is not None and clocks.moved else []
    below = ["suspicious: below the measured ceilings"] if suspicious else []
    return [*below, *moved, *compared]


def _as_lists(clocks: Clocks | None) -> dict[str, list[float]] | None:
    return None if clocks is None else {k: list(v) for k, v in clocks._asdict().items()}


def _beside(base: Row, ready: Ready, spreads: dict[int, Spread]) -> Row:
    theirs = None if ready.contender is None else 1e3 * spreads[id(ready.contender)].median
    return replace(
        base,
        peer=ready.peer.name,
        peer_median_ms=theirs,
        ratio=None if theirs is None else theirs / base.median_ms,
        peer_error=ready.errors.outputs,
        peer_gradient_error=ready.errors.gradients,
        peer_note=ready.note,
    )
