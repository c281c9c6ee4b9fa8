"""What the gateway uses of granian's server interface (RSGI), as types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from granian.rsgi import ProtocolClosed

__all__ = ["HeaderList", "HttpProtocol", "HttpScope", "HttpStream", "ProtocolClosed"]

HeaderList = list[tuple[str, str]]


class Headers(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...


class HttpScope(Protocol):
    """One request without its body."""

    @property
    def proto(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Headers: ...


class HttpStream(Protocol):
    """An open response; sending raises ProtocolClosed when the client is gone.

    granian does not wait for a slow client: it holds what has been sent and not been read, which
    `max_tokens` and the context bound.
    """

    async def send_bytes(self, data: bytes) -> None: ...


class HttpProtocol(Protocol):
    """The connection's side of one request: iterate for the body, call once to respond."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def client_disconnect(self) -> Awaitable[None]:
        """Ends when the client closes the connection."""
        ...

    def response_bytes(self, status: int, headers: HeaderList, body: bytes) -> None: ...

    def response_stream(self, status: int, headers: HeaderList) -> HttpStream: ...
