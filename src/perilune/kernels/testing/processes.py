"""The checks of ops spread over processes: on a GPU most of their time goes into compiling kernels.

A part is the conformance of an op, or one family of one subject; each process takes the next one
that waits. One that dies takes its part along, and that part is red.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from perilune.kernels.registry import OpSpec, spec
from perilune.kernels.testing.conformance import check
from perilune.kernels.testing.implementation import implementations
from perilune.kernels.testing.properties import FAMILIES, check_family, subjects
from perilune.kernels.testing.result import CheckResult

_CONFORMANCE = "conformance"
_PROCESSES = multiprocessing.get_context("spawn")
"""Neither CUDA nor threads survive a fork."""


class Asked(NamedTuple):
    """What `check` and `check_properties` are to check."""

    seed: int
    backend: str | None
    tier: str


class Part(NamedTuple):
    op: str
    family: str
    backend: str
    """Of its first result."""
    subject: int = 0
    """Which of the op's `subjects`; conformance has all of them."""


def check_in_processes(
    specs: Sequence[OpSpec], asked: Asked, jobs: int
) -> Generator[list[CheckResult]]:
    """For each op what `check` and `check_properties` find, in their order, by `jobs` processes.

    These look the ops up by name. All of them end with the generator, however that ends.
    """
    parts = [part for op in specs for part in _parts(op, asked)]
    left = {op.name: sum(part.op == op.name for part in parts) for op in specs}
    found: dict[Part, list[CheckResult]] = {}
    names = deque(left)
    for part, results in _finished(parts, asked, jobs):
        found[part] = results
        left[part.op] -= 1
        while names and not left[names[0]]:
            done = names.popleft()
            yield [result for each in parts if each.op == done for result in found.pop(each)]


def _parts(op: OpSpec, asked: Asked) -> list[Part]:
    first = implementations(op, asked.backend, asked.tier)[0]
    return [
        Part(op.name, _CONFORMANCE, first.backend),
        *(
            Part(op.name, family, subject.implementation.label(subject.dtype), index)
            for index, subject in enumerate(subjects(op, asked.seed, asked.backend, asked.tier))
            for family in FAMILIES
        ),
    ]


@dataclass(eq=False, kw_only=True)
class _Worker:
    process: Any
    pipe: Connection
    part: Part | None = None
    results: list[CheckResult] = field(default_factory=list)
    died: bool = False

    def take(self, part: Part) -> None:
        self.part, self.results = part, []
        # A process that died in between is found out where its results are read.
        with suppress(OSError):
            self.pipe.send(part)

    def is_done(self, seed: int) -> bool:
        """Takes what there is; whether the part is done, be it by the end of the process."""
        assert self.part is not None
        try:
            while self.pipe.poll():
                result = self.pipe.recv()
                if result is None:
                    return True
                self.results.append(result)
        except (EOFError, OSError):
            self.process.join()
            self.died = True
            self.results.append(self._death(self.part, seed))
            return True
        return False

    def _death(self, part: Part, seed: int) -> CheckResult:
        case, backend = "at the start", part.backend
        if self.results:
            case, backend = f"after {self.results[-1].case}", self.results[-1].backend
        why = _reason(self.process.exitcode)
        return CheckResult(part.op, case, backend, why, math.inf, 0.0, part.family, seed)


def _reason(exitcode: int) -> str:
    if exitcode < 0:
        return f"its process was killed by {signal.Signals(-exitcode).name}"
    return f"its process ended with exit status {exitcode}"


def _finished(
    parts: Sequence[Part], asked: Asked, jobs: int
) -> Generator[tuple[Part, list[CheckResult]]]:
    """Each part with its results, whichever is done next."""
    waiting, workers = deque(parts), list[_Worker]()
    threads = max(1, torch.get_num_threads() // jobs)
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_started(asked, threads))
                workers[-1].take(waiting.popleft())
            ready = wait([worker.pipe for worker in workers])
            for worker in [each for each in workers if each.pipe in ready]:
                if not worker.is_done(asked.seed):
                    continue
                assert worker.part is not None
                yield worker.part, worker.results
                if waiting and not worker.died:
                    worker.take(waiting.popleft())
                else:
                    workers.remove(worker)
                    _end(worker)
    finally:
        for worker in workers:
            _end(worker)


def _started(asked: Asked, threads: int) -> _Worker:
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_work, args=(theirs, asked, threads), daemon=True)
    with _uninterrupted():
        process.start()
    # Only then the pipe ends with the process.
    theirs.close()
    return _Worker(process=process, pipe=ours)


@contextmanager
def _uninterrupted() -> Generator[None]:
    """A process that is started inside leaves Ctrl-C to this one, which ends it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _work(pipe: Connection, asked: Asked, threads: int) -> None:
    """Results one by one, then None, for each part that comes."""
    torch.set_num_threads(threads)
    truths: dict[Any, Any] = {}
    while True:
        try:
            part = pipe.recv()
        except EOFError:
            return
        for result in _results(part, asked, truths):
            pipe.send(result)
        pipe.send(None)


def _results(part: Part, asked: Asked, truths: dict[Any, Any]) -> Iterator[CheckResult]:
    op = spec(part.op)
    if part.family == _CONFORMANCE:
        return check(op, seed=asked.seed, backend=asked.backend, tier=asked.tier)
    chosen = subjects(op, asked.seed, asked.backend, asked.tier, truths)
    return check_family(chosen[part.subject], part.family)
