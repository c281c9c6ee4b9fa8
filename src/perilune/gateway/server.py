"""The HTTP server: one granian worker in this process and in the running event loop.

A worker process of its own costs the same CPU a request, and would need a way to the engine.

A client that shuts down its sending side after the request (a half-closed connection) gets no
answer: the HTTP library below takes the end of input for a client that has left, which granian
gives no option to change. That same signal is what frees the sequence of a client that left.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from granian.constants import Interfaces
from granian.server.embed import Server

from perilune.core.errors import ConfigError
from perilune.gateway.app import Gateway

STOP_TIMEOUT_S = 5.0
"""How long open connections may hold up the end, after `Gateway.drain`."""

MAX_PORT = 65535
_BACKLOG = 1024
_SPARE_FILES = 128
_CONNECT_INTERVAL_S = 0.005


class Address(NamedTuple):
    host: str
    """A numeric address."""
    port: int

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self}"

    @property
    def reachable_url(self) -> str:
        """As `url`, with a name for the addresses that mean every interface."""
        is_any = self.host in ("0.0.0.0", "::")
        return f"http://localhost:{self.port}" if is_any else self.url

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def free_address(host: str, port: int) -> Address:
    """A numeric address to listen on; port 0 becomes a free one.

    Binds once to find out: the server itself binds with SO_REUSEPORT and would share a taken port.

    Raises:
        ConfigError: the host is unknown, or the port is in use or not allowed.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port {port} is outside 0..{MAX_PORT}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, target = infos[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            return Address(*probe.getsockname()[:2])
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"unknown host {host!r}: {error}") from None
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "it is in use; choose another with --port" if in_use else error.strerror
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}") from None


@asynccontextmanager
async def listening(gateway: Gateway, address: Address) -> AsyncIterator[None]:
    """Serves `gateway`: from the start of the block, where it can be reached, to the end.

    Raises:
        ConfigError: the server could not start.
    """
    server = Server(
        gateway,
        address=address.host,
        port=address.port,
        interface=Interfaces.RSGI,
        websockets=False,
        backlog=_BACKLOG,
        backpressure=_max_connections(),
        log_enabled=False,
    )
    serving = asyncio.create_task(server.serve())
    try:
        await _until_connectable(address, serving)
        yield
    finally:
        server.stop()
        await asyncio.wait({serving}, timeout=STOP_TIMEOUT_S)


def _max_connections() -> int:
    """As many as there are file descriptors, with some left for the rest of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft, 2**16) - _SPARE_FILES)


async def _until_connectable(address: Address, serving: asyncio.Task[None]) -> None:
    while not serving.done():
        try:
            _, writer = await asyncio.open_connection(*address)
        except ConnectionRefusedError:
            await asyncio.sleep(_CONNECT_INTERVAL_S)
        else:
            writer.close()
            await writer.wait_closed()
            return
    serving.result()
    raise ConfigError(f"the server at {address} ended at once")
