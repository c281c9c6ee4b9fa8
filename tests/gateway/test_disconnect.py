"""A client that leaves frees its sequence. The engine stands still, so nothing else can."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager

import pytest

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
}


@contextmanager
def request(served, path: str, **fields):
    """A raw connection with a request on it, and the response as a file."""
    body = json.dumps({"model": "fake"} | PATHS[path] | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(head.encode() + body)
        with connection.makefile("rb") as response:
            yield connection, response


def read_until(response, wanted: bytes) -> None:
    for line in response:
        if wanted in line:
            return
    pytest.fail(f"the response ended without {wanted!r}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_before_the_first_token(served, engine, path, stream, n):
    served.pause()
    with request(served, path, stream=stream, n=n):
        assert engine.wait_for_open(n)
    assert engine.wait_for_open(0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 3])
def test_in_the_middle_of_a_stream(served, engine, path, n):
    engine.script = lambda request: iter(lambda: ord("a"), None)
    engine.token_delay_s = 0.001
    with request(served, path, stream=True, n=n, max_tokens=4000) as (_, response):
        read_until(response, b'"a"')
        assert engine.num_open == n
        served.pause()
    assert engine.wait_for_open(0)


def test_after_a_ping(served, engine):
    served.pause()
    with request(served, "/v1/completions", stream=True) as (_, response):
        read_until(response, b": ping")
    assert engine.wait_for_open(0)


def test_a_client_that_never_reads_and_then_leaves(served, engine):
    engine.script = lambda request: iter(lambda: ord("a"), None)
    engine.token_delay_s = 0.005
    with request(served, "/v1/completions", stream=True, max_tokens=4000):
        assert engine.wait_for_open(1)
    assert engine.wait_for_open(0)


def test_a_reset_instead_of_a_close(served, engine):
    served.pause()
    with request(served, "/v1/completions", stream=True) as (connection, _):
        assert engine.wait_for_open(1)
        no_linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    assert engine.wait_for_open(0)


def test_a_body_that_never_ends(served, client):
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        )
    assert client.completions.create(model="fake", prompt="hi").choices[0].text == "hi"


def test_the_others_go_on(served, engine, client):
    served.pause()
    with request(served, "/v1/completions", stream=True):
        assert engine.wait_for_open(1)
        stream = client.completions.create(
            model="fake", prompt="x" * 30, stream=True, max_tokens=50, extra_headers={}
        )
        assert engine.wait_for_open(2)
    assert engine.wait_for_open(1)
    served.resume()
    assert "".join(chunk.choices[0].text for chunk in stream) == "x" * 30


def test_one_connection_serves_many_requests(served, engine):
    body = json.dumps({"model": "fake", "prompt": "hi"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with (
        socket.create_connection(served.address, timeout=30) as connection,
        connection.makefile("rb") as response,
    ):
        for _ in range(3):
            connection.sendall(head.encode() + body)
            assert b"200" in response.readline()
            length = 0
            while (line := response.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(response.read(length))["choices"][0]["text"] == "hi"
