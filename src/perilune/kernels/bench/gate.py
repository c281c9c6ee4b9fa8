"""Are the ops still as fast as stored medians say, beyond the noise that is measured here?

Each stored case is measured against itself (A/A), in several runs. How far the medians of these
runs lie apart is the noise; a median that is slower than the stored one by more is a regression,
if it shows a second time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perilune.kernels.bench.results import Row
from perilune.kernels.bench.runner import Bencher

RUNS = 4
LEAST_NOISE = 0.03
"""Between two processes more differs than within one: where memory lies, how warm the card is."""
MOST_NOISE = 0.25
"""Beyond this nothing can be judged, and the gate does not say that all is well."""


class Verdict(NamedTuple):
    op: str
    case: str
    backend: str
    stored_ms: float
    now_ms: float
    noise: float
    """A share of the time."""

    @property
    def ratio(self) -> float:
        return self.now_ms / self.stored_ms

    @property
    def word(self) -> str:
        if self.noise > MOST_NOISE:
            return "TOO NOISY"
        return "REGRESSION" if self.ratio > 1 + self.noise else "ok"

    @property
    def passed(self) -> bool:
        return self.word == "ok"

    def __str__(self) -> str:
        return (
            f"{self.op}  {self.case}  {self.backend}: {self.now_ms:.4g} ms now,"
            f" {self.stored_ms:.4g} stored, ratio {self.ratio:.3f}, noise {self.noise:.3f}:"
            f" {self.word}"
        )


def stored_medians(rows: Sequence[Row], op: str | None = None) -> dict[tuple[str, str, str], float]:
    """Milliseconds by op, case and backend; a case with several peers is one."""
    return {row.key[:3]: row.median_ms for row in rows if op is None or row.op == op}


def judge(bencher: Bencher, rows: Sequence[Row], op: str | None = None) -> Iterator[Verdict]:
    """A verdict for each stored case of `op`, or of every op.

    Raises:
        RefusedError: a stored case cannot be measured any more, its op is red or cheats.
    """
    for (name, case, backend), stored_ms in stored_medians(rows, op).items():
        verdict = _verdict(bencher, name, case, backend, stored_ms)
        if not verdict.passed:
            verdict = _verdict(bencher, name, case, backend, stored_ms)
        yield verdict


def _verdict(bencher: Bencher, op: str, case: str, backend: str, stored_ms: float) -> Verdict:
    timed = bencher.verified(op, case, backend)
    twins = [timed.main, timed.main]
    medians = [
        1e3 * spread.median
        for _ in range(RUNS)
        for spread in bencher.steady(timed, twins).measured.spreads
    ]
    noise = max(LEAST_NOISE, max(medians) / min(medians) - 1)
    return Verdict(op, case, backend, stored_ms, statistics.median(medians), noise)
