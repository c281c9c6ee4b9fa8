"""The order of what is asked of a GPU, against a stand-in that writes it down."""

from __future__ import annotations

import contextlib

import pytest
import torch

from perilune.kernels.bench import stopwatch as stopwatch_module
from perilune.kernels.bench.contender import GraphContender
from perilune.kernels.bench.stopwatch import CudaStopwatch, stopwatch


@pytest.fixture
def asked(monkeypatch):
    """Calls of `torch.cuda`, in order."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def elapsed_time(self, end):
            log.append("elapsed")
            return 250.0

    class Stream:
        def wait_stream(self, other):
            log.append("wait")

    class Graph:
        def replay(self):
            log.append("replay")

    @contextlib.contextmanager
    def capture(graph, capture_error_mode):
        assert capture_error_mode == "thread_local"
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return log


def test_events_enclose_the_work_and_the_wall_encloses_the_device(asked, monkeypatch):
    def second_clock():
        asked.append("wall")
        return 300_000_000 * asked.count("wall")

    monkeypatch.setattr(stopwatch_module, "second_clock_ns", second_clock)
    clock = stopwatch(torch.device("cuda"))
    assert isinstance(clock, CudaStopwatch)
    reading = clock.time(lambda: asked.append("work"))
    assert asked == [
        *("synchronize", "wall", "record", "work", "record", "synchronize", "wall", "elapsed")
    ]
    assert reading == pytest.approx((0.25, 0.3))


def test_calls_are_warmed_up_captured_once_and_replayed(asked):
    calls = [lambda: asked.append("a") or 1, lambda: asked.append("b") or 2]
    contender = GraphContender("x", calls)
    assert asked == ["wait", "a", "b", "wait", "capture", "a", "b", "captured"]
    del asked[:]
    assert contender.round() == 2
    assert contender.round() == 2
    assert asked == ["replay", "replay"]
    assert contender.num_calls == 2
