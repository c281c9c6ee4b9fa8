"""Energy counters of this machine: NVML for GPUs, RAPL for CPU packages.

NVML needs the package `nvidia-ml-py`; RAPL is `/sys/class/powercap`, which most systems let only
root read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

RAPL = Path("/sys/class/powercap")

_MICRO, _MILLI = 1e-6, 1e-3


class Counter(NamedTuple):
    name: str
    read_j: Callable[[], float]
    wraps_at_j: float | None = None
    """It starts again at 0 there."""


class EnergyMeter:
    """What was used since it was made. `update` must be called before a counter wraps twice:
    RAPL's do so after some minutes under full load."""

    def __init__(self, counters: list[Counter]) -> None:
        self._counters = counters
        self._last_j = {counter.name: counter.read_j() for counter in counters}
        self.used_j = {counter.name: 0.0 for counter in counters}

    def update(self) -> None:
        for counter in self._counters:
            now_j = counter.read_j()
            step_j = now_j - self._last_j[counter.name]
            if step_j < 0 and counter.wraps_at_j is not None:
                step_j += counter.wraps_at_j
            self._last_j[counter.name] = now_j
            self.used_j[counter.name] += max(0.0, step_j)


class Found(NamedTuple):
    counters: list[Counter]
    missing: list[str]
    """Why there are not more, one sentence for each kind."""


def find_counters(rapl: Path = RAPL) -> Found:
    """Every counter that can be read here."""
    found = Found([], [])
    for kind in (_nvml(), _rapl(rapl)):
        found.counters.extend(kind.counters)
        found.missing.extend(kind.missing)
    return found


def _nvml() -> Found:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return Found([], ["NVML: pynvml is not installed"])
    try:
        nvml.nvmlInit()
        counters = list(_gpu_counters(nvml))
    except nvml.NVMLError as error:
        return Found([], [f"NVML: {error}"])
    return Found(counters, [] if counters else ["NVML: there is no GPU"])


def _gpu_counters(nvml: Any) -> Iterator[Counter]:
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetTotalEnergyConsumption(device)  # raises here where it does not count

        def read_j(device: Any = device) -> float:
            return nvml.nvmlDeviceGetTotalEnergyConsumption(device) * _MILLI

        yield Counter(f"gpu{index}", read_j)


def _rapl(folder: Path) -> Found:
    counters: list[Counter] = []
    # The zones below a package (intel-rapl:0:0) are parts of it.
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            wraps_at_j = float((zone / "max_energy_range_uj").read_text()) * _MICRO
            counter = Counter(_zone_name(zone), _reader(zone / "energy_uj"), wraps_at_j)
            counter.read_j()
        except PermissionError:
            return Found([], [f"RAPL: {zone}/energy_uj may not be read"])
        except (OSError, ValueError) as error:
            return Found([], [f"RAPL: {error}"])
        counters.append(counter)
    return Found(counters, [] if counters else [f"RAPL: no zone in {folder}"])


def _zone_name(zone: Path) -> str:
    return f"{(zone / 'name').read_text().strip()}@{zone.name.partition(':')[2]}"


def _reader(path: Path) -> Callable[[], float]:
    return lambda: float(path.read_text()) * _MICRO
