"""A lane that does everything as late as it may: what is overwritten or freed too early shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from perilune.engine.fake_pools import FakePools
from perilune.engine.lane import Lane, Work


class LateLane:
    """A `Lane` of the host. Nothing is done before somebody waits for it, or captures."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0
        self._queue: deque[Work] = deque()
        self._num_done = 0

    def run(self, work: Work) -> None:
        self._queue.append(work)

    def capture(self, work: Work) -> Work:
        self._reach(self._num_done + len(self._queue))
        self.num_captured += 1
        work()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay

    def mark(self) -> Work:
        last = self._num_done + len(self._queue)
        return lambda: self._reach(last)

    @torch.inference_mode()  # as what was enqueued
    def _reach(self, count: int) -> None:
        while self._num_done < count:
            self._num_done += 1
            try:
                self._queue.popleft()()
            except BaseException:
                # A device that fails does nothing of what was to follow.
                self._num_done += len(self._queue)
                self._queue.clear()
                raise


def on_lane(lane: Lane, pools: FakePools) -> None:
    """What is done to the pools is enqueued from now on."""
    for name in ("copy_slots", "copy_pages", "poison_pages", "poison_slots"):
        setattr(pools, name, _enqueued(lane, getattr(pools, name)))


def _enqueued(
    lane: Lane, method: Callable[[Sequence[Any]], None]
) -> Callable[[Sequence[Any]], None]:
    return lambda what: lane.run(lambda: method(what))
