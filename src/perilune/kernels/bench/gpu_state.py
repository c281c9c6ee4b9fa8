"""Clocks, power and temperature of the GPU while something is measured."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
PERIOD_MS = 100
MOVED = 0.03
"""A share of the highest clock: steps of a few MHz are normal."""


class GpuState(NamedTuple):
    sm_mhz: float
    mem_mhz: float
    power_w: float
    temperature_c: float


class Clocks(NamedTuple):
    """Lowest and highest value seen during a run."""

    sm_mhz: tuple[float, float]
    mem_mhz: tuple[float, float]
    power_w: tuple[float, float]
    temperature_c: tuple[float, float]

    @property
    def moved(self) -> bool:
        pairs = (self.sm_mhz, self.mem_mhz)
        return any(low < (1 - MOVED) * high for low, high in pairs)

    def __str__(self) -> str:
        return f"SM {self.sm_mhz[0]:.0f}-{self.sm_mhz[1]:.0f} MHz"


def summary(states: Sequence[GpuState]) -> Clocks | None:
    """None where nothing was seen."""
    if not states:
        return None
    return Clocks(*((min(values), max(values)) for values in zip(*states, strict=True)))


def parse(text: str) -> list[GpuState]:
    """Lines of nvidia-smi; those with a field that this card does not tell are left out."""
    states = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS) and all(_is_number(cell) for cell in cells):
            states.append(GpuState(*(float(cell) for cell in cells)))
    return states


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


class Sampler:
    """Watches one GPU for the length of a `with`; without nvidia-smi it sees nothing.

    A process of its own samples, so that the work in between is not interrupted.
    """

    def __init__(self, gpu_id: str | None, command: str = "nvidia-smi") -> None:
        self._path = shutil.which(command) if gpu_id is not None else None
        self._gpu_id = gpu_id
        self._process: subprocess.Popen[str] | None = None
        self.states: list[GpuState] = []

    def __enter__(self) -> Sampler:
        if self._path is not None:
            query = f"--query-gpu={','.join(FIELDS)}"
            options = ["--format=csv,noheader,nounits", f"-lms={PERIOD_MS}", f"--id={self._gpu_id}"]
            self._process = subprocess.Popen(
                [self._path, query, *options],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self.states = parse(self._process.communicate()[0])
            self._process = None
