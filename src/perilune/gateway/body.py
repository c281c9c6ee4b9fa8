"""Reading a request's body within a size limit."""

from __future__ import annotations

import asyncio

from perilune.core.errors import PayloadTooLargeError
from perilune.gateway.errors import BodyTimeoutError
from perilune.gateway.rsgi import HttpProtocol, HttpScope

DRAIN_BYTES = 64 * 2**20
"""Of a body that is too large, so much is still read and dropped: a client that is writing sees an
answer only after it has written everything; without this it sees a broken connection."""
TIMEOUT_S = 60.0


async def read_body(scope: HttpScope, proto: HttpProtocol, max_bytes: int) -> bytes:
    """The body; never holds more than `max_bytes` of it and one network read.

    Raises:
        PayloadTooLargeError: the body is longer than `max_bytes`.
        BodyTimeoutError: it took longer than TIMEOUT_S.
    """
    declared = scope.headers.get("content-length") or ""
    num_bytes = int(declared) if declared.isdigit() else 0
    if num_bytes > DRAIN_BYTES or (num_bytes > max_bytes and scope.headers.get("expect")):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _read(proto, max_bytes)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive completely within {TIMEOUT_S:.0f} seconds"
        ) from None


async def _read(proto: HttpProtocol, max_bytes: int) -> bytes:
    body = bytearray()
    num_bytes = 0
    async for piece in proto:
        num_bytes += len(piece)
        if num_bytes > DRAIN_BYTES:
            break
        if num_bytes <= max_bytes:
            body += piece
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than the limit of {max_bytes} bytes")
