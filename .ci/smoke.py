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
    blocks = dict(re.findall(r"```(sh|python)\n(.*?)```", _readme(), re.DOTALL))
    command = ["make", "serve", "ARGS=--port 0"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        url = _url(server)
        _curl(blocks["sh"].replace(README_URL, url))
        _run_python(blocks["python"].replace(README_URL, url))
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(timeout=60)
    print("smoke: make serve answers the README's curl and Python examples")


def _readme() -> str:
    """What stands behind the heading that shows the requests."""
    return (ROOT / "README.md").read_text(encoding="utf-8").split("## Ask it something", 1)[1]


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
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        sys.exit(f"smoke: the Python example printed {done.stdout!r}\n{done.stderr}")


if __name__ == "__main__":
    main()
