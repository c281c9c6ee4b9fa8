"""`perilune serve` as a process: start, answers, signals."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from openai import OpenAI

import perilune.model.model  # noqa: F401  (it resolves its ops)
from perilune.cli.serve import _kernels
from perilune.engine.opening import kernels_for
from perilune.kernels.registry import resolve, resolved

SERVE = [sys.executable, "-m", "perilune.cli.main", "serve"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def start(checkpoint, *options: str, on: str = "cpu") -> tuple[subprocess.Popen, str, str]:
    """(process, url, curl line), when the server has said that it is ready."""
    process = subprocess.Popen(
        [*SERVE, str(checkpoint), "--port", "0", "--threads", "1", "--device", "cpu", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    assert process.stdout
    ready, curl, kernels = (process.stdout.readline() for _ in range(3))
    if not ready:
        pytest.fail(process.communicate()[1])
    found = re.search(r"http://127\.0\.0\.1:\d+", ready)
    assert found, ready
    assert kernels.startswith(f"perilune: on {on}: ")
    return process, found[0], curl


def end(process: subprocess.Popen) -> tuple[int, str]:
    """(exit code, stderr) of a process that is about to end."""
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.fixture(scope="module")
def served(checkpoint) -> Iterator[tuple[str, str]]:
    process, url, curl = start(checkpoint)
    yield url, curl
    process.send_signal(signal.SIGINT)
    code, err = end(process)
    assert code == 0
    assert "Traceback" not in err


def test_the_curl_line_works_as_printed(served):
    _, curl = served
    url, body = re.fullmatch(
        r"curl (\S+) -H 'content-type: application/json' -d '(.*)'\n", curl
    ).groups()
    with urllib.request.urlopen(url, data=(body[:-1] + ', "max_tokens": 4}').encode()) as answer:
        assert json.load(answer)["model"] == "tiny"


@pytest.mark.parametrize("name", resolved())
def test_the_line_about_kernels_says_what_runs(name, caplog):
    line = _kernels({"device": "cpu", "tensor_parallel": 1} | kernels_for("cpu"))
    own, _, reference = line.partition("the reference for ")
    with caplog.at_level(logging.INFO, logger="perilune.kernels"), pytest.raises(TypeError):
        resolve(name)(torch.zeros(1))  # the choice comes before the missing arguments
    ran = own if "(own, declared for it)" in caplog.text else reference
    assert name in re.findall(r"\w+", ran)


def test_the_model_is_named_for_its_directory(served):
    with OpenAI(base_url=f"{served[0]}/v1", api_key="none") as client:
        (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", 4096)


def test_streams_side_by_side_equal_the_same_streams_alone(served):
    with OpenAI(base_url=f"{served[0]}/v1", api_key="none") as client:

        def text(seed: int) -> str:
            stream = client.completions.create(
                model="tiny", prompt="ab" * seed, seed=seed, max_tokens=24, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

        alone = [text(seed) for seed in range(1, 9)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(text, range(1, 9)))
    assert together == alone
    assert len(set(alone)) > 1


def test_two_ranks_answer_as_one_process(served, checkpoint):
    def text(url: str) -> str:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.completions.create(
                model="tiny", prompt="ab" * 50, temperature=0, max_tokens=24
            )
        return answer.choices[0].text

    process, url, _ = start(checkpoint, "--tensor-parallel", "2", on="2 x cpu")
    try:
        assert text(url) == text(served[0]) != ""
    finally:
        process.send_signal(signal.SIGTERM)
        code, err = end(process)
    assert (code, "Traceback" in err) == (0, False), err


def test_the_engine_shows_in_the_metrics(served):
    with urllib.request.urlopen(f"{served[0]}/metrics") as answer:
        text = answer.read().decode()
    assert 'perilune_engine_num_running{model="tiny"} 0.0' in text


def test_a_client_that_leaves_frees_the_engine(served):
    with OpenAI(base_url=f"{served[0]}/v1", api_key="none") as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_even_with_a_stream_open(checkpoint, number):
    process, url, _ = start(checkpoint)
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=4000, stream=True, logprobs=20
        )
        next(iter(stream))
        process.send_signal(number)
        assert process.stderr.readline().startswith("perilune: stopping")
        process.send_signal(number)
        code, err = end(process)
        stream.close()
    assert (code, err) == (0, "")


def test_a_port_in_use_is_one_line_before_anything_is_loaded(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*SERVE, str(checkpoint), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert re.fullmatch(rf"perilune: error: .*port {port} .*in use.*\n", done.stderr)
    assert done.stdout == ""
