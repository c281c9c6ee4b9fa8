"""The error tree.

    PeriluneError
    ├── ConfigError        a configuration is wrong (unknown key, impossible size)
    ├── CheckpointError    a checkpoint's files are wrong
    ├── UnsupportedError   valid, but not something this build can do
    └── RequestError       a request is wrong; carries the HTTP status and the OpenAI error fields
        ├── NotFoundError          404
        ├── ContextLengthError     400, code context_length_exceeded
        ├── PayloadTooLargeError   413
        ├── OverloadedError        429, with retry_after_s
        ├── DeadlineError          504: it took longer than it was to take
        └── EngineError            500 / 503: the engine failed, the request is over

Every error reads as one sentence that names what is wrong and where.
"""


class PeriluneError(Exception):
    """Root of every error that perilune raises on purpose."""


class ConfigError(PeriluneError):
    """A configuration is wrong; the message names the key."""


class CheckpointError(PeriluneError):
    """A checkpoint's files are wrong; the message names the file and the tensor."""


class UnsupportedError(PeriluneError):
    """The input is valid, but this build cannot do it; the message says what can."""


class RequestError(PeriluneError):
    """A request is wrong. `status`, `type`, `code` and `param` become the OpenAI error body."""

    status: int = 400
    type: str = "invalid_request_error"
    code: str | None = None
    retry_after_s: float | None = None
    """When the same request may go well; None says nothing of it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class NotFoundError(RequestError):
    status = 404
    type = "not_found_error"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class PayloadTooLargeError(RequestError):
    status = 413
    code = "payload_too_large"


class OverloadedError(RequestError):
    """The queue is full; the client should come back after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The answer was not complete in the time that the request gave it."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class EngineError(RequestError):
    status = 500
    type = "server_error"
    code = "engine_error"
