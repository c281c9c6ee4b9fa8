"""Checks that an op computes what it says: against its truth, and its properties."""

from perilune.kernels.testing.compare import relative_error
from perilune.kernels.testing.conformance import check
from perilune.kernels.testing.implementation import (
    REFERENCE,
    Implementation,
    implementations,
    is_here,
)
from perilune.kernels.testing.result import CheckResult

__all__ = [
    "REFERENCE",
    "CheckResult",
    "Implementation",
    "check",
    "implementations",
    "is_here",
    "relative_error",
]
