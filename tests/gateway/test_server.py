"""The server's start and end."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from perilune.core.errors import ConfigError
from perilune.core.fakes import FakeEngine
from perilune.gateway.app import Gateway
from perilune.gateway.backends.local import LocalModel
from perilune.gateway.router import Route, Router
from perilune.gateway.server import Address, free_address, listening
from perilune.telemetry.metrics import ServerMetrics
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat


def gateway_of(engine: FakeEngine) -> Gateway:
    model = LocalModel(engine, XtmlFormat(byte_level()))
    return Gateway(Router([Route(model=model)]), ServerMetrics())


async def start(gateway: Gateway, host: str = "127.0.0.1", port: int = 0) -> Address:
    address = free_address(host, port)
    async with listening(gateway, address):
        return address


async def ask(address: Address, path: str, body: dict | None = None) -> str:
    """The whole response to one request on a connection of its own."""
    reader, writer = await asyncio.open_connection(*address)
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response.decode()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_a_free_port_is_found(host):
    assert asyncio.run(start(gateway_of(FakeEngine()), host)).port > 0


def test_the_url_of_an_address():
    assert Address("0.0.0.0", 80).reachable_url == "http://localhost:80"
    assert Address("127.0.0.2", 80).reachable_url == "http://127.0.0.2:80"
    assert Address("127.0.0.1", 80).url == "http://127.0.0.1:80"
    assert Address("::1", 80).url == "http://[::1]:80"


def test_a_port_in_use_is_refused():
    async def start_twice() -> None:
        address = free_address("127.0.0.1", 0)
        async with listening(gateway_of(FakeEngine()), address):
            with pytest.raises(ConfigError, match=f"port {address.port} .*in use"):
                await start(gateway_of(FakeEngine()), port=address.port)
            assert "200" in await ask(address, "/health")

    asyncio.run(start_twice())


def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            asyncio.run(start(gateway_of(FakeEngine()), port=port))


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("no..host", 0, "unknown host"),
        ("127.0.0.1", 70_000, "outside 0..65535"),
        ("192.0.2.1", 0, "cannot listen"),
    ],
)
def test_an_address_that_cannot_be(host, port, says):
    with pytest.raises(ConfigError, match=says):
        asyncio.run(start(gateway_of(FakeEngine()), host, port))


def test_after_the_end_nothing_listens():
    async def probe() -> None:
        address = await start(gateway_of(FakeEngine()))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(probe())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def drain() -> None:
        engine = FakeEngine()
        gateway = gateway_of(engine)
        address = free_address("127.0.0.1", 0)
        async with listening(gateway, address):
            engine.pause()
            body = {"model": "fake", "prompt": "hello"}
            running = asyncio.create_task(ask(address, "/v1/completions", body))
            await asyncio.to_thread(engine.wait_for_open, 1)
            draining = asyncio.create_task(gateway.drain(grace_s=30))
            await asyncio.sleep(0)
            refused = await ask(address, "/v1/completions", body)
            assert "503" in refused
            assert "shutting down" in refused
            assert "503" in await ask(address, "/health")
            assert not draining.done()
            engine.resume()
            assert '"text":"hello"' in await running
            await draining

    asyncio.run(drain())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlasts_the_grace_ends_with_an_error(stream):
    async def close() -> str:
        engine = FakeEngine()
        gateway = gateway_of(engine)
        address = free_address("127.0.0.1", 0)
        async with listening(gateway, address):
            engine.pause()
            body = {"model": "fake", "prompt": "hello", "stream": stream}
            running = asyncio.create_task(ask(address, "/v1/completions", body))
            await asyncio.to_thread(engine.wait_for_open, 1)
            await gateway.drain(grace_s=0.01)
            await engine.close()
            return await running

    assert "the engine is shutting down" in asyncio.run(close())


def test_draining_an_idle_server_takes_no_time():
    async def drain() -> None:
        gateway = gateway_of(FakeEngine())
        async with listening(gateway, free_address("127.0.0.1", 0)):
            await asyncio.wait_for(gateway.drain(grace_s=1000), timeout=10)

    asyncio.run(drain())
