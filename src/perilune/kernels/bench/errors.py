"""Why a benchmark prints no number.

UnsupportedError
└── RefusedError           measured or not, the time would say nothing
    ├── RedOpError         conformance of the op is red
    ├── NotRunError        another implementation ran than the one that was asked for
    ├── DishonestError     wrong values, or results that are not there when the call returns
    └── ImpossibleTimeError  faster than the hardware, or two clocks disagree
"""

from perilune.core.errors import UnsupportedError


class RefusedError(UnsupportedError):
    """No speed is printed; the message says which op and case, and why."""


class RedOpError(RefusedError):
    """Conformance of the op is red."""


class NotRunError(RefusedError):
    """Another implementation ran than the one that was asked for."""


class DishonestError(RefusedError):
    """Wrong values where it was timed, or work that is not done when the call returns."""


class ImpossibleTimeError(RefusedError):
    """The timer or the kernel is broken."""
