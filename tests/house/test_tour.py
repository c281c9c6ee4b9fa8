"""docs/tour.md names what runs: one request is traced through it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

from perilune.engine.opening import open_engine
from perilune.gateway.app import Gateway
from perilune.gateway.backends.local import LocalModel
from perilune.gateway.router import Route, Router
from perilune.gateway.server import free_address, listening
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.save import save_checkpoint
from perilune.telemetry.metrics import ServerMetrics
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat

DOCS = Path(__file__).parents[2] / "docs"
TOUR = (DOCS / "tour.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^### (\d+)\.", TOUR, re.MULTILINE)
LINKS = [
    ((DOCS / path).resolve(), name) for name, path in re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", TOUR)
]
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "max_tokens": 3,
    "temperature": 0,
    "logit_bias": {str(ord("h")): 100},
}


def test_there_are_at_most_fifteen_stops():
    assert [int(number) for number in STOPS] == list(range(1, len(STOPS) + 1))
    assert len(STOPS) <= 15
    assert len(LINKS) >= len(STOPS)


@pytest.mark.parametrize(("path", "name"), LINKS, ids=[name for _, name in LINKS])
def test_the_function_is_where_the_tour_says(path, name):
    scope = ast.parse(path.read_text(encoding="utf-8")).body
    *classes, function = name.split(".")
    for class_name in classes:
        (found,) = [n for n in scope if isinstance(n, ast.ClassDef) and n.name == class_name]
        scope = found.body
    functions = [n for n in scope if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert function in [n.name for n in functions]


def test_a_request_takes_the_tour(tmp_path):
    directory = tmp_path / "tiny"
    tokenizer = byte_level()
    raw = tiny_k3(vocab_size=tokenizer.vocab_size) | {"eos_token_id": min(tokenizer.eos_ids)}
    model = Transformer(parse_config(raw, "tiny"))
    save_checkpoint(
        random_weights(model, torch.Generator().manual_seed(0)), directory, raw_config=raw
    )
    with first_calls() as (called, forget):
        events = asyncio.run(served_events(directory, after_loading=forget))
    assert events[-1] == "data: [DONE]"
    assert "".join(reasoning(event) for event in events[:-1]) == "hhh"
    on_tour = set(LINKS)
    assert [call for call in called if call in on_tour] == LINKS


async def served_events(directory: Path, after_loading: Callable[[], None]) -> list[str]:
    engine = open_engine(directory, threads=1)
    after_loading()
    try:
        local = LocalModel(engine, XtmlFormat(byte_level()))
        gateway = Gateway(Router([Route(model=local)]), ServerMetrics())
        address = free_address("127.0.0.1", 0)
        async with listening(gateway, address):
            return await asyncio.to_thread(post, f"{address.url}/v1/chat/completions")
    finally:
        await engine.close()


def post(url: str) -> list[str]:
    request = urllib.request.Request(url, json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode().strip().split("\n\n")


def reasoning(event: str) -> str:
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return "".join(choice["delta"].get("reasoning_content") or "" for choice in choices)


@contextmanager
def first_calls() -> Iterator[tuple[list[tuple[Path, str]], Callable[[], None]]]:
    """A list, filled at the end with (file, qualified name) of every function in the order of their
    first calls, in this thread and in those that start meanwhile; and a way to start anew."""
    order: dict[CodeType, None] = {}
    called: list[tuple[Path, str]] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            order.setdefault(frame.f_code)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called, order.clear
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        called += [(Path(code.co_filename), code.co_qualname) for code in order]
