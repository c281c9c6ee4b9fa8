"""What ends a load test before it has a result.

ConfigError
├── TraceError     a line of a trace is wrong; names the file and the line
├── WorkloadError  trace, load and bounds do not go together, or leave nothing to send
└── TargetError    the server cannot be reached, or refuses the first request
"""

from __future__ import annotations

from perilune.core.errors import ConfigError


class TraceError(ConfigError):
    """A trace cannot be read; the message names the file and the line."""


class WorkloadError(ConfigError):
    """There is nothing to send, or no time to send it at."""


class TargetError(ConfigError):
    """The server cannot be measured; the message has its own words where it had any."""
