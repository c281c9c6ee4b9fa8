"""How long the GPU's kernels run, and which of them how long, as the profiler sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

REPEATS = 3
SHOWN, NAME_LENGTH = 12, 60


class Ran(NamedTuple):
    name: str
    start_us: float
    end_us: float


class KernelTimes(NamedTuple):
    """Of one run."""

    busy_s: float
    """In which some kernel ran: where two overlap, they count once."""
    largest: dict[str, float]
    """Seconds by name, of those that take most."""


def kernel_times(run: Callable[[], object], device: torch.device) -> KernelTimes | None:
    """None where there is no GPU, or the profiler sees nothing on it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize(device)
    ran = [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return summed(ran, REPEATS)


def summed(ran: Iterable[Ran], repeats: int) -> KernelTimes | None:
    ran = sorted(ran, key=lambda each: each.start_us)
    if not ran:
        return None
    busy_us, until_us = 0.0, ran[0].start_us
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, start_us, end_us in ran:
        busy_us += max(0.0, end_us - max(start_us, until_us))
        until_us = max(until_us, end_us)
        by_name[name[:NAME_LENGTH]] += end_us - start_us
    shown = sorted(by_name.items(), key=lambda each: -each[1])[:SHOWN]
    largest = {name: us / 1e6 / repeats for name, us in shown}
    return KernelTimes(busy_us / 1e6 / repeats, largest)
