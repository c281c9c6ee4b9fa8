"""Who takes part in a measurement: a round of calls, one a copy of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


class Contender:
    """`round()` makes every call once and returns what the last one returned."""

    def __init__(self, name: str, calls: Sequence[Call], *, backward: bool = False) -> None:
        self.name = name
        self.num_calls = len(calls)
        self._calls = calls
        self._backward = backward

    def round(self) -> Any:
        if self._backward:
            return self._all()
        with torch.inference_mode():
            return self._all()

    def _all(self) -> Any:
        out = None
        for call in self._calls:
            out = call()
        return out


class GraphContender(Contender):
    """The same calls, captured once and replayed: no launch is paid for.

    Raises:
        RuntimeError: from CUDA, if the calls cannot be captured (they synchronise, or allocate
            outside of torch).
    """

    def __init__(self, name: str, calls: Sequence[Call]) -> None:
        super().__init__(name, calls)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().round()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL has one that asks the device about events all the time.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._out = super().round()

    def round(self) -> Any:
        self._graph.replay()
        return self._out
