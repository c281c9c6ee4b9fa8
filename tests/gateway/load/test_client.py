"""What servers can do to a request: each ends as a sample that says what happened."""

from __future__ import annotations

import asyncio
import time

import pytest
from raw_server import GOOD, RawServer, piece, reply, running, stream, usage

from perilune.gateway.load.client import Asker, connected
from perilune.gateway.load.errors import TargetError
from perilune.gateway.load.prompts import IdPrompts, TextPrompts
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.workload import Block, Request

REQUEST = Request(0.0, (Block("x", 3),), 2)


def ask(server: RawServer, *, api_key: str | None = None, is_text: bool = False, **options):
    """One request's sample."""

    async def main() -> Sample:
        async with running(server) as url, connected(url + "/v1/", api_key) as client:
            asker = Asker(
                client,
                TextPrompts("s") if is_text else IdPrompts("s"),
                model_id="m",
                options={"temperature": 0.5},
                **({"endpoint": "completions", "timeout_s": 20.0, "max_retries": 0} | options),
            )
            sample = Sample(request=REQUEST, due_at=time.perf_counter())
            await asker.send(asker.prepare(REQUEST), sample)
            assert sample.due_at <= sample.sent_at <= sample.ended_at
            return sample

    return asyncio.run(main())


def test_a_good_answer_and_what_was_asked():
    server = RawServer()
    sample = ask(server, api_key="k")
    assert sample.is_ok
    assert sample.num_output == 2
    (body,) = server.bodies
    prompt = body.pop("prompt")
    assert len(prompt) == 3
    assert body == {
        "model": "m",
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert server.heads[0].startswith("POST /v1/completions ")
    assert "authorization: bearer k" in server.heads[0].lower()


def test_a_chat():
    server = RawServer()
    ask(server, endpoint="chat", is_text=True)
    assert server.heads[0].startswith("POST /v1/chat/completions ")
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 3


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (reply('{"error": {"message": "bad id"}}', "400 Bad Request"), "http 400", "bad id"),
        (reply("<html>", "502 Bad Gateway"), "http 502", "<html>"),
        (stream(piece("a"), {"error": {"message": "broke"}}), "error in the stream", "broke"),
        (stream(piece("a")), "cut off", ""),
        (GOOD[:-90], "cut off", None),
        (b"", "cut off", None),
        (b"HTTP/9 nonsense\r\n\r\n", "cut off", None),
        (reply(""), "cut off", ""),
        (reply("data: {\n\n"), "no event stream", None),
    ],
)
def test_a_bad_answer(answer, status, message):
    sample = ask(RawServer(lambda number: answer))
    assert sample.status == status
    assert message is None or sample.message == message
    assert not sample.is_censored


def test_a_server_that_says_nothing_is_given_up_and_its_wait_counts():
    sample = ask(RawServer(lambda number: None), timeout_s=0.3)
    assert sample.status == "timeout"
    assert sample.is_censored
    assert sample.ttft_s == sample.e2e_s >= 0.3


def test_nobody_listens():
    async def main() -> Sample:
        server = RawServer()
        async with running(server) as url:
            pass
        async with connected(url, None) as client:
            asker = Asker(
                client,
                IdPrompts("s"),
                model_id="m",
                endpoint="completions",
                timeout_s=20.0,
                max_retries=0,
                options={},
            )
            sample = Sample(request=REQUEST, due_at=time.perf_counter())
            await asker.send(asker.prepare(REQUEST), sample)
            with pytest.raises(TargetError, match="cannot reach"):
                await client.model_card(None)
            return sample

    assert asyncio.run(main()).status == "no connection"


BUSY = reply('{"error": {"message": "queue full"}}', "429 Too Many", "retry-after: 0.01")


def test_429_is_not_sent_again():
    server = RawServer(lambda number: BUSY)
    sample = ask(server)
    assert (sample.status, sample.message) == ("http 429", "queue full")
    assert sample.num_429 == len(server.bodies) == 1
    assert sample.retry_after_s == 0.01


def test_429_is_sent_again_as_often_as_is_asked_for_and_the_wait_counts():
    server = RawServer(lambda number: BUSY if number < 2 else GOOD)
    sample = ask(server, max_retries=2)
    assert sample.is_ok
    assert sample.num_429 == 2
    assert sample.message == ""
    assert sample.ttft_s >= 0.02
    server = RawServer(lambda number: BUSY)
    assert ask(server, max_retries=2).status == "http 429"
    assert len(server.bodies) == 3


@pytest.mark.parametrize("header", ["x: y", "retry-after: Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_no_number(header):
    assert ask(RawServer(lambda number: reply("", "429 Too Many", header))).retry_after_s is None


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (reply("nonsense"), "no list of models"),
        (reply('{"error": {"message": "no key"}}', "401 Unauthorized"), "answers 401: no key"),
        (reply('{"data": []}'), "has no model m; it has: none"),
        (reply('{"data": [{"id": "other"}]}'), "has no model m; it has: other"),
        (b"nonsense", "cannot ask"),
    ],
)
def test_a_server_without_the_model(models, says):
    async def main() -> None:
        server = RawServer()
        server.models = models
        async with running(server) as url, connected(url, None) as client:
            with pytest.raises(TargetError, match=says):
                await client.model_card("m")

    asyncio.run(main())


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://[::1", ""])
def test_a_url_that_is_none(url):
    async def main() -> None:
        async with connected(url, None) as client:
            with pytest.raises(TargetError):
                await client.model_card(None)

    asyncio.run(main())


def test_usage_is_the_servers():
    answer = stream(piece("abc"), piece("", "stop"), usage(9, 5, 4))
    sample = ask(RawServer(lambda number: answer))
    assert (sample.num_prompt, sample.num_output, sample.cached_tokens) == (9, 5, 4)
