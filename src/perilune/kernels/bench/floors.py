"""Whether a time can be true.

Below the time that the data sheet allows, the kernel skipped work, read a cache or the timer is
broken: an error. Between that and the ceilings measured in the same run it is suspicious: a pure
read may pass the rate of a copy by a little, anything else has to be explained.
"""

from __future__ import annotations

from typing import NamedTuple

from perilune.kernels.bench.cases import Work
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.errors import ImpossibleTimeError

DATA_SHEETS = {"H200": Ceilings(4.8e12, 989e12)}
"""By a part of the device's name: memory bandwidth and dense bf16 rate of the vendor's sheet."""
WITHOUT_SHEET = {"cuda": 1.5, "cpu": 3.0}
"""How far the sheet of another device may lie above what was measured. On an H200 the factors are
1.12 (bytes) and 1.46 (flops); a CPU is shared, and its copy may have been slow for a moment."""


class Floor(NamedTuple):
    impossible_s: float
    measured_s: float


def data_sheet(device_name: str, device_type: str, measured: Ceilings) -> Ceilings:
    for part, sheet in DATA_SHEETS.items():
        if part in device_name:
            return sheet
    factor = WITHOUT_SHEET[device_type]
    return Ceilings(factor * measured.bytes_per_s, factor * measured.flops_per_s)


def least_seconds(work: Work, rates: Ceilings) -> float:
    """Bytes and flops may overlap completely."""
    return max(work.bytes / rates.bytes_per_s, work.flops / rates.flops_per_s)


def floor(work: Work, sheet: Ceilings, measured: Ceilings) -> Floor:
    return Floor(least_seconds(work, sheet), least_seconds(work, measured))


def is_suspicious(seconds: float, limits: Floor, what: str) -> bool:
    """Whether the time is below what the measured ceilings allow.

    Raises:
        ImpossibleTimeError: it is below what the hardware can do.
    """
    if seconds < limits.impossible_s:
        raise ImpossibleTimeError(
            f"{what}: {1e3 * seconds:.4g} ms is below {1e3 * limits.impossible_s:.4g} ms, the"
            " least that this hardware needs: the timer or the kernel is broken"
        )
    return seconds < limits.measured_s
