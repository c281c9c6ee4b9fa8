"""Every error a client can meet, and the HTTP answer it becomes.

RequestError
├── BodyError              400  not JSON, or a field is wrong
├── MethodNotAllowedError  405  with the methods that are allowed
├── BodyTimeoutError       408  the body did not arrive in time
├── ShuttingDownError      503  the server takes no new requests
└── UnhealthyError         503  a model can serve nothing now; only /health says so
NotFoundError
├── UnknownRouteError      404
└── UnknownModelError      404  code model_not_found
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import msgspec

from perilune.core.errors import (
    CheckpointError,
    ConfigError,
    NotFoundError,
    PeriluneError,
    RequestError,
    UnsupportedError,
)
from perilune.gateway.reply import JSON, Reply

_log = logging.getLogger(__name__)


class BodyError(RequestError):
    """The body is not JSON, or a field of it is wrong; `param` names the field."""


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTimeoutError(RequestError):
    status = 408
    code = "body_timeout"


class ShuttingDownError(RequestError):
    status = 503
    type = "server_error"
    code = "shutting_down"


class UnhealthyError(RequestError):
    status = 503
    type = "server_error"
    code = "unhealthy"


class UnknownRouteError(NotFoundError):
    code = "unknown_url"


class UnknownModelError(NotFoundError):
    code = "model_not_found"


class Fault(NamedTuple):
    """What the client is told beside the message."""

    status: int
    type: str
    code: str | None


FAULTS: dict[type[PeriluneError], Fault | None] = {
    RequestError: None,  # carries its own
    UnsupportedError: Fault(400, "invalid_request_error", "unsupported"),
    ConfigError: Fault(500, "server_error", "config_error"),
    CheckpointError: Fault(500, "server_error", "checkpoint_error"),
}
"""The one table from an error to its HTTP status, type and code; a subclass inherits its line."""

INTERNAL = Fault(500, "server_error", "internal_error")
"""For what is no PeriluneError: a fault of this program, whose text stays in the log."""
INTERNAL_MESSAGE = "internal error; the server's log has the details"


def fault_of(error: Exception) -> Fault:
    """The table's line for `error`."""
    if isinstance(error, RequestError):
        return Fault(error.status, error.type, error.code)
    for base in type(error).__mro__:
        fault = FAULTS.get(base)
        if fault is not None:
            return fault
    return INTERNAL


def error_body(error: Exception) -> bytes:
    """The OpenAI error object as JSON."""
    fault = fault_of(error)
    message = INTERNAL_MESSAGE if fault is INTERNAL else str(error)
    param = error.param if isinstance(error, RequestError) else None
    fields = {"message": message, "type": fault.type, "param": param, "code": fault.code}
    return msgspec.json.encode({"error": fields})


def error_reply(error: Exception) -> Reply:
    """The HTTP answer for `error`."""
    headers = [JSON]
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    if isinstance(error, MethodNotAllowedError):
        headers.append(("allow", error.allowed))
    return Reply(fault_of(error).status, headers, error_body(error))


def log_fault(error: Exception, request_id: str) -> None:
    """Writes a fault of this program with its traceback; what a client does wrong needs no log.

    503 is no fault but a state, logged where it began and told to every client while it lasts.
    """
    status = fault_of(error).status
    if status >= 500 and status != 503:
        _log.error("request %s failed", request_id, exc_info=error)
