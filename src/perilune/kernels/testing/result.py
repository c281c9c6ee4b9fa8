"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class CheckResult(NamedTuple):
    op: str
    case: str
    """The input: named so that with `seed` it can be made again."""
    backend: str
    """`reference` or a device type; with the dtype, where that is not fp32."""
    what: str
    """Which output, mutated input or gradient."""
    error: float
    """||x - truth|| / ||truth||, in float64; of a yes-or-no property 0 or infinity."""
    bound: float
    family: str = "conformance"
    seed: int = 0
    refused: bool = False
    """The implementation said in a clear error that it does not serve this input."""

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


class Finding(NamedTuple):
    """One comparison inside a case."""

    what: str
    error: float
    bound: float


class Case(NamedTuple):
    """One input, and how to find out what an implementation makes of it."""

    name: str
    findings: Callable[[], Iterator[Finding]]
    seed: int
