"""Checks that an op computes what it says: against its truth, and its properties."""

from perilune.kernels.testing.compare import relative_error
from perilune.kernels.testing.conformance import check
from perilune.kernels.testing.implementation import (
    REFERENCE,
    Implementation,
    implementations,
    is_here,
    is_plugin,
    use_interpreter,
)
from perilune.kernels.testing.processes import Asked, check_in_processes
from perilune.kernels.testing.properties import check_properties
from perilune.kernels.testing.refusals import refusals
from perilune.kernels.testing.result import CheckResult
from perilune.kernels.testing.tiers import TIERS

__all__ = [
    "REFERENCE",
    "TIERS",
    "Asked",
    "CheckResult",
    "Implementation",
    "check",
    "check_in_processes",
    "check_properties",
    "implementations",
    "is_here",
    "is_plugin",
    "refusals",
    "relative_error",
    "use_interpreter",
]
