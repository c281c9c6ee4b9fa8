"""Time of a piece of work, by two clocks that know nothing of each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

_perf_counter = time.perf_counter_ns
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)


class Reading(NamedTuple):
    seconds: float
    """What is reported: device events on a GPU."""
    wall_s: float
    """The second clock, from before the first launch until the device has nothing left to do."""


class Stopwatch(Protocol):
    slack_s: float
    """By how much the clocks may differ for reasons of their own (a launch, a synchronisation)."""

    def time(self, run: Callable[[], object]) -> Reading: ...


class CpuStopwatch:
    slack_s = 50e-6

    def time(self, run: Callable[[], object]) -> Reading:
        wall = second_clock_ns()
        start = _perf_counter()
        run()
        end = _perf_counter()
        return Reading((end - start) / 1e9, (second_clock_ns() - wall) / 1e9)


class CudaStopwatch:
    slack_s = 200e-6

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, run: Callable[[], object]) -> Reading:
        torch.cuda.synchronize(self._device)
        wall = second_clock_ns()
        self._start.record()
        run()
        self._end.record()
        # Of the device, not of the event: work on another stream counts for the second clock.
        torch.cuda.synchronize(self._device)
        wall_s = (second_clock_ns() - wall) / 1e9
        return Reading(self._start.elapsed_time(self._end) / 1e3, wall_s)


def second_clock_ns() -> int:
    """Of the kernel, where it has one that no daemon adjusts."""
    return time.monotonic_ns() if _RAW is None else time.clock_gettime_ns(_RAW)


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def agree(reading: Reading, slack_s: float) -> bool:
    """Whether both clocks tell the same, within 5 % and the slack."""
    return abs(reading.seconds - reading.wall_s) <= 0.05 * reading.wall_s + slack_s
