"""Engine cores without torch, for engine processes that have to start in no time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from perilune.core.errors import CheckpointError, OverloadedError, RequestError
from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.errors import EngineClosedError
from perilune.engine.host import Opened

BREAKING = range(901, 908)
"""Prompts with one of these ids do so in the step after their first token, the last one's before
the request is taken up."""
EXIT, SEGFAULT, HANG, RAISE, FATAL, NONSENSE, EXIT_AT_ONCE = BREAKING


class LostDeviceError(Exception):
    pass


@dataclass(eq=False)
class Sequence:
    request: TokenRequest
    num_tokens: int = 0


class Emitted(NamedTuple):
    sequence: Sequence
    event: TokenEvent


def token(request: TokenRequest, position: int) -> int:
    """What the core answers: a function of the request alone."""
    return (sum(request.prompt_ids) + position) % 500


@dataclass
class CountingCore:
    """A `StepCore`. Every open sequence gets a token a step."""

    step_s: float = 0.0
    max_open: int = 1000
    running: dict[Sequence, None] = field(default_factory=dict)
    num_steps: int = 0
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, sequence: Sequence) -> None:
        with self.changed:
            if self.closed:
                raise EngineClosedError("the engine is closed")
            if len(self.running) >= self.max_open:
                raise OverloadedError("full", retry_after_s=2.5)
            self.running[sequence] = None
            self.changed.notify_all()

    def abort(self, sequence: Sequence) -> None:
        with self.changed:
            self.running.pop(sequence, None)

    def step(self) -> list[Emitted]:
        time.sleep(self.step_s)
        self.num_steps += 1
        emitted = []
        for sequence in list(self.running):
            if sequence.num_tokens:
                self._break(set(sequence.request.prompt_ids))
            event = self._next(sequence)
            if event.finish_reason is not None:
                self.abort(sequence)
            emitted.append(Emitted(sequence, event))
        return emitted

    def fail(self, message: str) -> list[Emitted]:
        with self.changed:
            ended = list(self.running)
            self.running.clear()
        return [
            Emitted(
                s,
                TokenEvent(
                    request_id=s.request.request_id,
                    token_id=None,
                    finish_reason="error",
                    error=message,
                ),
            )
            for s in ended
        ]

    def close(self, failure: str | None = None) -> list[Emitted]:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        return self.fail(failure or "the engine is shutting down")

    def wait_for_work(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.running)
            return not self.closed

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), generated_tokens_total=self.num_steps)

    def _next(self, sequence: Sequence) -> TokenEvent:
        request = sequence.request
        sequence.num_tokens += 1
        return TokenEvent(
            request_id=request.request_id,
            token_id=token(request, sequence.num_tokens - 1),
            finish_reason="length" if sequence.num_tokens == request.max_tokens else None,
        )

    def _break(self, ids: set[int]) -> None:
        if EXIT in ids:
            os._exit(3)
        if SEGFAULT in ids:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HANG in ids:
            threading.Event().wait()
        if RAISE in ids:
            raise ValueError("a step broke")
        if NONSENSE in ids:
            os.write(int(sys.argv[1]), b"\xff" * 8)
        if FATAL in ids:
            raise LostDeviceError("the device is lost")


def admit(request: TokenRequest, info: EngineInfo) -> Sequence:
    if not request.prompt_ids:
        raise RequestError("the prompt is empty", param="prompt")
    if EXIT_AT_ONCE in request.prompt_ids:
        os._exit(5)
    return Sequence(request)


def open_core(*, vocab_size: int = 1000, model_id: str = "counting", **fields) -> Opened:
    info = EngineInfo(
        model_id=model_id, vocab_size=vocab_size, max_context=2**21, eos_ids=frozenset({1, 2})
    )
    return Opened(core=CountingCore(**fields), info=info, admit=admit, fatal=(LostDeviceError,))


def _once(marker: str, then: Callable[[], None], **fields) -> Opened:
    """The first engine that is opened with this file name is well; later ones do `then`."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        then()
    return open_core(**fields)


def open_once(*, marker: str, **fields) -> Opened:
    def fail() -> None:
        raise CheckpointError("a shard has gone")

    return _once(marker, fail, **fields)


def open_dying_at_first_call(*, marker: str) -> Opened:
    def admit_later(request: TokenRequest, info: EngineInfo) -> Sequence:
        _once(marker, lambda: None)
        os._exit(6)

    opened = open_core()
    return opened if os.path.exists(marker) else replace(opened, admit=admit_later)


def open_slowly_again(*, marker: str, seconds: float, **fields) -> Opened:
    return _once(marker, lambda: time.sleep(seconds), **fields)


def open_changed(*, marker: str) -> Opened:
    try:
        return _once(marker, lambda: 1 / 0)
    except ZeroDivisionError:
        return open_core(vocab_size=7)


def open_never() -> Opened:
    threading.Event().wait()
    raise AssertionError


def open_broken() -> Opened:
    raise RuntimeError("no such luck")


def open_unreadable() -> Opened:
    raise PermissionError(13, "Permission denied", "/weights")


def open_without_extra() -> Opened:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


def open_dying() -> Opened:
    os._exit(4)


def open_with_graphs(**options) -> Opened:
    """On a CPU, too, steps that only decode are captured and run ahead."""
    from perilune.engine import opening

    core = opening.EngineCore
    opening.EngineCore = lambda model, **given: core(model, **given | {"graphs": True})
    return opening.open_core(**options)


def open_with_a_rank_that_cannot_start(**options) -> Opened:
    from perilune.engine import leader, opening

    leader.FOLLOWER = "perilune.no_such_module"
    return opening.open_core(**options)
