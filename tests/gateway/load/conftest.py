"""Time that passes only where somebody waits for it, and a server that says what it is told to."""

from __future__ import annotations

import asyncio
import importlib.util
import selectors
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

_found = importlib.util.spec_from_file_location(
    "raw_server", Path(__file__).with_name("raw_server.py")
)
sys.modules["raw_server"] = importlib.util.module_from_spec(_found)
_found.loader.exec_module(sys.modules["raw_server"])

LEAST_WAIT_S = 2e-9


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now_s = 100.0
        self._clock_resolution = LEAST_WAIT_S / 2

    def time(self) -> float:
        return self.now_s

    def call_at(self, when, *args, **kwargs):
        # Without a least wait, one that rounding makes of none would be over at once, for ever.
        return super().call_at(max(when, self.now_s + LEAST_WAIT_S), *args, **kwargs)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits, and nothing will wake it"
            self._loop.now_s += timeout
        return events


@pytest.fixture(scope="session")
def in_virtual_time() -> Callable[[Callable[[VirtualLoop], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine function that takes the loop."""

    def run(main):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main(runner.get_loop()))

    return run
