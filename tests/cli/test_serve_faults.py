"""Faults of a served model, in a real process: what clients read, what the log holds."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

BREAKING = """
import sys
import torch
from perilune.cli.main import main
from perilune.model.model import Transformer

run = Transformer.forward

def forward(self, token_ids_T, *args, **kwargs):
    if (token_ids_T == ord("Y")).any():
        raise ValueError("a step broke")
    if (token_ids_T == ord("Z")).any():
        raise torch.AcceleratorError("the device is lost")
    return run(self, token_ids_T, *args, **kwargs)

Transformer.forward = forward
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--threads", "1", "--device", "cpu"]))
"""
"""A server whose model breaks at a Y, and for good at a Z."""
FIELDS = {"model": "tiny", "logit_bias": {str(ord(letter)): -100 for letter in "YZ"}}
"""The model, which samples, writes neither by itself."""


@pytest.fixture
def process(checkpoint):
    process = subprocess.Popen(
        [sys.executable, "-c", BREAKING, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def url(process) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    return found[0] if found else pytest.fail(process.communicate()[1])


def ask(url: str, prompt: str | None = None, **fields):
    """(status, request id, body)"""
    data = None if prompt is None else json.dumps(FIELDS | {"prompt": prompt} | fields).encode()
    try:
        with urllib.request.urlopen(url, data, timeout=60) as answer:
            return answer.status, answer.headers["x-request-id"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["x-request-id"], error.read().decode()


def end(process: subprocess.Popen) -> str:
    """The log of a server that is told to end."""
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    return log


def test_a_step_that_breaks_is_told_and_logged_once_and_the_server_goes_on(process, url):
    status, request_id, body = ask(f"{url}/v1/completions", "secret words Y")
    assert status == 500
    assert json.loads(body)["error"]["code"] == "engine_error"
    assert ask(f"{url}/health")[0] == 200
    assert ask(f"{url}/v1/completions", "words")[0] == 200
    log = end(process)
    assert log.count(f"request {request_id} failed") == 1
    assert log.count("ValueError: a step broke") == 1
    assert "Traceback" in log.partition(request_id)[2]
    assert "secret" not in log


def test_a_lost_device_ends_open_streams_refuses_new_requests_and_shows_in_health(process, url):
    completions = f"{url}/v1/completions"
    body = json.dumps(FIELDS | {"prompt": "x", "max_tokens": 4000, "stream": True})
    with urllib.request.urlopen(completions, body.encode(), timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        assert ask(completions, "secret words Z")[0] == 500
        events = stream.read().decode()
    assert "serves no more" in events
    assert "[DONE]" not in events
    for _ in range(2):
        status, _, text = ask(completions, "more")
        assert status == 503
        assert "serves no more" in json.loads(text)["error"]["message"]
    status, _, text = ask(f"{url}/health")
    assert (status, json.loads(text)["error"]["code"]) == (503, "unhealthy")
    log = end(process)
    assert log.count("AcceleratorError: the device is lost") == 1
    assert len(re.findall("request [0-9a-f]{24} failed", log)) == 2
    assert "secret" not in log
