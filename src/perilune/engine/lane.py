"""Where steps run: what is handed over is done in that order, and nobody waits unless he asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Lane(Protocol):
    """A device's queue. `GpuLane` is a CUDA stream, `HostLane` does everything at once; tests have
    one that does it as late as it can."""

    def run(self, work: Work) -> None:
        """Enqueues `work`, which reads and writes tensors on the device. Host memory that it reads
        or writes is its own until a mark behind it has been reached."""
        ...

    def capture(self, work: Work) -> Work:
        """What does `work` again, with tensors of the same addresses, for the cost of one launch.
        `work` runs here too, at least once."""
        ...

    def mark(self) -> Work:
        """Waits, when it is called, for all that was enqueued before `mark`."""
        ...


class HostLane:
    def run(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        work()
        return work

    def mark(self) -> Work:
        return _nothing


class GpuLane:
    """The stream that is current where it is used. Its graphs take their memory from one pool: none
    runs beside another, and what one leaves in there is only for the one right behind it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)

    def run(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        stream, side = torch.cuda.current_stream(self._device), self._side
        side.wait_stream(stream)
        with torch.cuda.stream(side):  # what a library's first call allocates is no part of a graph
            work()
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def mark(self) -> Work:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def lane_of(device: torch.device) -> Lane:
    return GpuLane(device) if device.type == "cuda" else HostLane()


def _nothing() -> None:
    pass
