"""Percentiles by nearest rank: every one is a value that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct


class Percentiles(Struct, frozen=True, kw_only=True):
    """Of one quantity, in its own unit."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Of the values that are there; None where none is."""
    ranked = sorted(value for value in values if value is not None)
    if not ranked:
        return None
    return Percentiles(
        num=len(ranked),
        mean=math.fsum(ranked) / len(ranked),
        p50=nearest_rank(ranked, 50),
        p90=nearest_rank(ranked, 90),
        p95=nearest_rank(ranked, 95),
        p99=nearest_rank(ranked, 99),
        max=ranked[-1],
    )


def nearest_rank(ranked: Sequence[float], percent: int) -> float:
    """The smallest of the ascending values that `percent` % of them do not exceed."""
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)]
