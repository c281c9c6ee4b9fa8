"""The bytes of an event stream: framing, pings, errors on the way."""

from __future__ import annotations

import http.client
import json

import pytest

COMPLETIONS = "/v1/completions"


def post(served, path: str, **fields):
    """(status, headers, body as text)"""
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    try:
        connection.request("POST", path, json.dumps(fields))
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def test_the_frames_of_a_stream(served):
    status, headers, text = post(served, COMPLETIONS, model="fake", prompt="ab", stream=True)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-request-id"]
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert [json.loads(f.removeprefix("data: "))["choices"][0]["text"] for f in frames] == [
        "a",
        "b",
        "",
    ]


def test_pings_while_the_first_token_takes_long(served, engine):
    engine.token_delay_s = 0.7
    _, _, text = post(served, COMPLETIONS, model="fake", prompt="a", max_tokens=1, stream=True)
    assert text.startswith(": ping\n\n: ping\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_an_error_after_a_ping_is_an_event(served, engine):
    engine.token_delay_s, engine.fail_after = 0.3, 0
    status, _, text = post(served, COMPLETIONS, model="fake", prompt="a", stream=True)
    assert status == 200
    *_, last, end = text.split("\n\n")
    assert end == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_error"
    assert "[DONE]" not in text


@pytest.mark.parametrize("n", [1, 2])
def test_an_engine_that_fails_in_the_middle(served, engine, n):
    engine.fail_after = 2
    _, _, text = post(served, COMPLETIONS, model="fake", prompt="abcd", stream=True, n=n)
    frames = text.split("\n\n")
    assert json.loads(frames[-2].removeprefix("data: "))["error"] == {
        "message": "the fake engine broke on purpose",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert "[DONE]" not in text
    assert engine.wait_for_open(0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_at_once_is_a_status(served, engine, stream):
    engine.fail_after = 0
    status, _, text = post(served, COMPLETIONS, model="fake", prompt="ab", stream=stream)
    assert status == 500
    assert json.loads(text)["error"]["message"] == "the fake engine broke on purpose"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_back(served, stream):
    fields = {"model": "scripted", "prompt": "overloaded", "stream": stream}
    status, headers, text = post(served, COMPLETIONS, **fields)
    assert status == 429
    assert headers["retry-after"] == "3"
    assert json.loads(text)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_logged_and_not_told(served, caplog, stream):
    fields = {"model": "scripted", "prompt": "bug", "stream": stream}
    status, headers, text = post(served, COMPLETIONS, **fields)
    assert status == 500
    assert json.loads(text)["error"]["code"] == "internal_error"
    assert "secret detail" not in text
    assert "secret detail" in caplog.text
    assert headers["x-request-id"] in caplog.text


def test_a_bug_in_mid_stream_is_logged_and_not_told(served, caplog):
    _, headers, text = post(served, COMPLETIONS, model="scripted", prompt="late bug", stream=True)
    assert '"code":"internal_error"' in text
    assert "secret detail" not in text
    assert "secret detail" in caplog.text
    assert headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_just_stops_is_an_error(served, stream):
    fields = {"model": "scripted", "prompt": "no finish", "stream": stream}
    status, _, text = post(served, COMPLETIONS, **fields)
    assert status == (200 if stream else 500)
    assert "stopped before it had finished" in text
    assert "[DONE]" not in text
