"""Errors of the engine.

    core.errors.EngineError          500: a step failed
    ├── EngineClosedError            503: the engine has been closed, or has failed for good
    ├── EngineRestartingError        503: its process has died and is being started again
    ├── WireError                    500: two processes do not understand each other
    ├── RanksApartError              500: one rank of several has failed in what all have to do
    └── PoolFullError                503: no page or slot is free; the scheduler preempts instead

    core.errors.RequestError         400
    └── GrammarError                 400: a grammar that is none, or that takes too much

Other bad requests raise `RequestError`, `ContextLengthError` or `OverloadedError` of the core tree.
"""

from perilune.core.errors import EngineError, RequestError
from perilune.core.types import TokenEvent


class GrammarError(RequestError):
    """The answer cannot be held to this grammar; the message says where and why."""

    code = "invalid_grammar"


class EngineClosedError(EngineError):
    """A request came after `close`, or after a fault that ended the engine."""

    status = 503
    code = "engine_closed"


class PoolFullError(EngineError):
    """Fewer pages or slots are free than were asked for; nothing was taken.

    The scheduler makes room (eviction, preemption) and asks again. A client sees it only when one
    sequence alone needs more than the whole pool.
    """

    status = 503
    code = "cache_full"

    def __init__(self, kind: str, *, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} {kind}s of the cache are wanted and {free} are free")
        self.kind = kind
        self.wanted = wanted
        self.free = free


class EngineRestartingError(EngineError):
    """The engine's process has died, and the next one is not ready yet."""

    status = 503
    code = "engine_restarting"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WireError(EngineError):
    """A message that no frame holds, a frame that is none, or two versions of the wire."""

    code = "engine_wire"


class RanksApartError(EngineError):
    """One rank has failed in what all have to do together. The engine ends, and is started anew."""

    code = "engine_ranks"


def error_event(request_id: str, message: str) -> TokenEvent:
    """How a sequence ends that has failed."""
    return TokenEvent(request_id=request_id, token_id=None, finish_reason="error", error=message)
