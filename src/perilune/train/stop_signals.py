"""Ctrl-C and SIGTERM as a wish that the loop meets at the end of a step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """Inside its `with` block the first SIGINT or SIGTERM only sets `received`; a second one acts
    as it did before the block.

    A signal that the process ignores, as a shell's background job ignores Ctrl-C, stays ignored.
    For the main thread alone.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def is_stopped(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()
