"""Faults of a served model, in a real process: what clients read, what the log holds."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

BREAKING = """
import sys
from perilune.cli import local_model
from perilune.cli.main import main

local_model.OPEN_CORE = "breaking_engine:open_core"
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--threads", "1", "--device", "cpu"]))
"""
FIELDS = {"model": "tiny", "logit_bias": {str(ord(letter)): -100 for letter in "YZK"}}
"""The model, which samples, writes no fatal letter by itself."""


@pytest.fixture
def process(checkpoint):
    process = subprocess.Popen(
        [sys.executable, "-c", BREAKING, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
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


def answered(url: str, prompt: str) -> int:
    """The status of a client that comes back when it is told to, as long as a start may take."""
    for _ in range(6):
        status, _, _ = ask(url, prompt)
        if status != 503:
            return status
    return 503


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


@pytest.mark.parametrize(
    ("letter", "says", "how"),
    [
        ("Z", "has failed", "AcceleratorError: the device is lost"),
        ("K", "crashed", "was killed by SIGKILL"),
    ],
    ids=["lost device", "killed"],
)
def test_an_engine_that_dies_ends_open_streams_and_is_started_again(
    process, url, letter, says, how
):
    completions = f"{url}/v1/completions"
    body = json.dumps(FIELDS | {"prompt": "x", "max_tokens": 4000, "stream": True})
    with urllib.request.urlopen(completions, body.encode(), timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        assert ask(completions, f"secret words {letter}")[0] == 500
        status, _, text = ask(f"{url}/health")
        assert (status, json.loads(text)["error"]["code"]) == (503, "unhealthy")
        assert "being started again" in text
        events = stream.read().decode()
    assert says in events
    assert events.count('"error"') == 1
    assert "[DONE]" not in events
    assert answered(completions, "more") == 200
    assert ask(f"{url}/health")[0] == 200
    assert 'perilune_engine_restarts_total{model="tiny"} 1.0' in ask(f"{url}/metrics")[2]
    log = end(process)
    assert log.count(how) == 1
    assert len(re.findall("request [0-9a-f]{24} failed", log)) == 2
    assert "secret" not in log


def test_a_server_that_is_killed_takes_its_engine_along(process, url):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (engine,) = children.read_text().split()
    descriptor = os.pidfd_open(int(engine))
    process.kill()
    process.wait()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)
