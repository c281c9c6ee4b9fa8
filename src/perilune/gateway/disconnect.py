"""Work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from perilune.gateway.rsgi import HttpProtocol, ProtocolClosed

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


async def while_connected(proto: HttpProtocol, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    Raises:
        ClientGoneError: after `work` has been cancelled and has cleaned up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(proto.client_disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        raise ClientGoneError
    try:
        return task.result()
    except ProtocolClosed:
        raise ClientGoneError from None
