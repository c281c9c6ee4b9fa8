"""Errors of the engine.

    core.errors.EngineError          500: a step failed
    └── EngineClosedError            503: the engine has been closed, or has failed for good

Bad requests raise `RequestError`, `ContextLengthError` or `OverloadedError` of the core tree.
"""

from perilune.core.errors import EngineError


class EngineClosedError(EngineError):
    """A request came after `close`, or after a fault that ended the engine."""

    status = 503
    code = "engine_closed"
