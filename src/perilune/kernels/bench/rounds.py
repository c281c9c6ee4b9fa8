"""Contenders take turns, round by round, on values that none of them has seen before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perilune.kernels.bench.contender import Contender
from perilune.kernels.bench.errors import ImpossibleTimeError
from perilune.kernels.bench.stopwatch import Reading, Stopwatch, agree

LONG_S, LONG_ROUNDS = 6.0, 5
"""Where the fewest rounds would take longer than that, these do."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    min_rounds: int = 10
    max_rounds: int = 200
    seconds: float = 2.0
    """Of all contenders of a case together, about."""
    rotate_bytes: int | None = None
    """Inputs to rotate over; None: several times the last cache."""
    attempts: int = 3
    """A run whose clock moved, or that looks odd, is made again up to so many times in all."""


class Spread(NamedTuple):
    """Seconds a call."""

    median: float
    p10: float
    p90: float


class Measured(NamedTuple):
    spreads: list[Spread]
    """One a contender."""
    repeat: float
    """Shortest time of the first contender on values that it has just seen, over its shortest on
    new ones: what disturbs a busy machine only ever adds."""


def spread(seconds: Sequence[float]) -> Spread:
    """Median and tenths of at least two values."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(statistics.median(seconds), tenths[0], tenths[-1])


def measure(
    contenders: Sequence[Contender],
    refresh: Callable[[], None],
    stopwatch: Stopwatch,
    settings: Settings,
) -> Measured:
    """A/B/A/B in one process, every round on new values; after some the first one repeats.

    Raises:
        ImpossibleTimeError: two independent clocks do not agree on how long a round took.
    """
    refresh()
    warm = [_warm(contender, stopwatch) for contender in contenders]
    num_rounds = int(settings.seconds / max(1e-9, sum(warm) + warm[0] / 2))
    fewest = settings.min_rounds
    if fewest * sum(warm) > LONG_S:
        fewest = min(fewest, LONG_ROUNDS)
    num_rounds = min(settings.max_rounds, max(fewest, num_rounds))
    readings: list[list[Reading]] = [[] for _ in contenders]
    repeats = []
    for i in range(num_rounds):
        refresh()
        # The order turns, so that nobody always runs on caches that the same other one left.
        turns = list(enumerate(contenders))
        for index, contender in turns if i % 2 == 0 else reversed(turns):
            readings[index].append(stopwatch.time(contender.round))
        if i % 2 == 0:
            repeats.append(stopwatch.time(contenders[0].round).seconds)
    for contender, taken in zip(contenders, readings, strict=True):
        _require_agreement(contender.name, taken, stopwatch)
    spreads = [
        spread([reading.seconds / contender.num_calls for reading in taken])
        for contender, taken in zip(contenders, readings, strict=True)
    ]
    on_new = min(reading.seconds for reading in readings[0])
    return Measured(spreads, min(repeats) / on_new)


def _warm(contender: Contender, stopwatch: Stopwatch) -> float:
    """Seconds of a round once everything is compiled, tuned and paged in."""
    contender.round()
    return stopwatch.time(contender.round).seconds


def _require_agreement(name: str, readings: Sequence[Reading], stopwatch: Stopwatch) -> None:
    off = [reading for reading in readings if not agree(reading, stopwatch.slack_s)]
    if 2 * len(off) > len(readings):
        worst = max(off, key=lambda reading: abs(reading.wall_s - reading.seconds))
        raise ImpossibleTimeError(
            f"{name}: a round took {1e3 * worst.seconds:.4g} ms by the timer and"
            f" {1e3 * worst.wall_s:.4g} ms by the second clock: work runs where the timer does not"
            " look, or the timer is broken"
        )
