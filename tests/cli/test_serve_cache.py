"""What a server keeps of prompts, as its clients see it, and its options."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., dict[str, Any]]
SERVE = [sys.executable, "-m", "perilune.cli.main", "serve"]
PROMPT = "abcdefgh" * 40


@contextmanager
def serving(checkpoint, *options: str) -> Iterator[Ask]:
    process = subprocess.Popen(
        [*SERVE, str(checkpoint), "--port", "0", "--threads", "1", "--device", "cpu", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found

    def ask(path: str, **fields: Any) -> dict[str, Any]:
        body = json.dumps({"model": "tiny", "temperature": 0} | fields).encode()
        with urllib.request.urlopen(found[0] + path, body, timeout=60) as answer:
            return json.load(answer)

    yield ask
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def checkpoint(checkpoint, tmp_path_factory) -> Path:
    """The same one, with room for fifty turns."""
    directory = tmp_path_factory.mktemp("long") / "tiny"
    shutil.copytree(checkpoint, directory)
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 16_384
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.fixture(scope="module")
def ask(checkpoint) -> Iterator[Ask]:
    with serving(checkpoint) as ask:
        yield ask


def complete(ask: Ask, prompt: str) -> tuple[str, int]:
    answer = ask("/v1/completions", prompt=prompt, max_tokens=12)
    return answer["choices"][0]["text"], cached_tokens(answer)


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_without_a_prefix_cache_every_prompt_is_computed(ask, checkpoint):
    with serving(checkpoint, "--no-prefix-cache") as off:
        alone = [complete(off, PROMPT) for _ in range(2)]
    kept = [complete(ask, PROMPT) for _ in range(2)]
    assert [cached for _, cached in alone] == [0, 0]
    assert [cached for _, cached in kept] == [0, len(PROMPT) - 1]
    assert len({text for text, _ in alone + kept}) == 1


def test_states_are_kept_where_the_options_say(ask, checkpoint):
    """Of a prompt that comes back with another end: by the page, or at the interval asked for."""
    beginning, ends = "x" * 130, ("a" * 20, "b" * 20)
    assert [complete(ask, beginning + end)[1] for end in ends] == [0, 128]
    sizes = ("--cache", "0.2", "--state-share", "0.3")
    with serving(checkpoint, "--state-align", "0", "--state-interval", "60", *sizes) as other:
        assert [complete(other, beginning + end)[1] for end in ends] == [0, 120]


def test_fifty_turns_of_a_chat_compute_their_new_tokens(ask):
    """A turn's answer is all there the next time, but for its last token, which was never fed."""
    messages: list[dict[str, str]] = []
    num_known = new_tokens = 0
    form = {"type": "regex", "pattern": "[a-z]{6}"}  # bytes that are a text, whatever the weights
    for turn in range(50):
        messages.append({"role": "user", "content": f"turn {turn:02}"})
        answer = ask(
            "/v1/chat/completions",
            messages=messages,
            max_tokens=6,
            response_format=form,
            chat_template_kwargs={"thinking": False},
        )
        usage = answer["usage"]
        assert cached_tokens(answer) == max(num_known - 1, 0)
        new = usage["prompt_tokens"] - num_known
        assert turn < 2 or new == new_tokens, "as many in every turn"
        num_known, new_tokens = usage["prompt_tokens"] + usage["completion_tokens"], new
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
    assert num_known > 50 * 20


def test_nothing_is_kept_behind_a_cache_that_is_off(checkpoint, tmp_path):
    done = subprocess.run(
        [*SERVE, str(checkpoint), "--port", "0", "--no-prefix-cache", "--disk-cache", "files"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("perilune: error: host memory and files are of no use")
    assert done.stderr.count("\n") == 1
