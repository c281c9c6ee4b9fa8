"""Runs `make serve`, and against it what the README tells a newcomer to run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
README_URL = "http://localhost:8000"


def main() -> None:
    blocks = re.findall(r"```(sh|python)\n(.*?)```", _readme(), re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "python", "python"], blocks
    command = ["make", "serve", "ARGS=--port 0"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        url = _url(server)
        for language, source in blocks:
            run = _curl if language == "sh" else _run_python
            run(source.replace(README_URL, url))
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(timeout=60)
    print("smoke: make serve answers the README's curl and Python examples")


def _readme() -> str:
    """The section that shows the requests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## Ask it something", 1)[1].split("\n## ", 1)[0]


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            return found[0]
    sys.exit("smoke: make serve ended before it was ready")


def _curl(line: str) -> None:
    """Sends what the curl line would; a bare machine has no curl."""
    words = shlex.split(line)
    assert words[:2] == ["curl", "-N"], words
    body = words[words.index("-d") + 1].encode()
    request = urllib.request.Request(words[2], body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = answer.read().decode().strip().split("\n\n")
    if len(events) < 3 or events[-1] != "data: [DONE]":
        sys.exit(f"smoke: not a whole stream: {events}")


def _run_python(source: str) -> None:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        sys.exit(f"smoke: a Python example printed {done.stdout!r}\n{done.stderr}")


if __name__ == "__main__":
    main()
