"""An engine core at one end of a channel: takes calls, steps, sends the events of each step.

It sees a core through `StepCore` and imports no torch, so that its tests start in no time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from perilune.core.errors import EngineError, PeriluneError, RequestError
from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.channel import Channel
from perilune.engine.errors import WireError
from perilune.engine.wire import (
    VERSION,
    Abort,
    Close,
    Generate,
    Hello,
    Refused,
    Start,
    Step,
    Taken,
    ToEngine,
    decode_request,
)
from perilune.engine.wire_errors import pack

logger = logging.getLogger(__name__)

FAILURE = "the engine has failed and goes on no more; its log has the reason"


class Emitted(Protocol):
    """An event of a sequence."""

    @property
    def sequence(self) -> Any: ...
    @property
    def event(self) -> TokenEvent: ...


class StepCore(Protocol):
    """What is used of `core.EngineCore`, which tells the contracts."""

    def add(self, sequence: Any) -> None: ...
    def abort(self, sequence: Any) -> None: ...
    def step(self) -> Iterable[Emitted]: ...
    def fail(self, message: str) -> Iterable[Emitted]: ...
    def close(self, failure: str | None = None) -> Iterable[Emitted]: ...
    def wait_for_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A core that is ready to step, and what its host has to know."""

    core: StepCore
    info: EngineInfo
    admit: Callable[[TokenRequest, EngineInfo], Any]
    """Makes the sequence of a request. Raises RequestError."""
    prepare: Callable[[], None] = lambda: None
    """To be called in the thread that will step."""
    fatal: tuple[type[BaseException], ...] = ()
    """Faults after which no later step can succeed."""


class EngineHost:
    """Two threads: one steps and sends events, one reads, admits and aborts. A request with a
    grammar is admitted in one of its own, which waits while the grammar is compiled."""

    def __init__(self, channel: Channel, opened: Opened) -> None:
        self._channel = channel
        self._opened = opened
        self._core = opened.core
        self._sequences: dict[int, Any] = {}
        """By open call; None while the call is being admitted."""
        self._calls: dict[Any, int] = {}
        self._changing = threading.Lock()
        self._telling = threading.Lock()

    def run(self) -> bool:
        """Says hello, then steps in this thread until the other end closes the engine or its side.

        False after a fault that ended the engine: every open call has been told.
        """
        try:
            self._opened.prepare()
            self._channel.send(Hello(VERSION, self._opened.info))
            threading.Thread(target=self._read, name="perilune-calls", daemon=True).start()
            while self._core.wait_for_work():
                self._tell(self._step())
        except OSError:
            self._core.close()  # the other end is gone, and with it everyone who had asked
        except BaseException:
            # Without this thread nobody would ever answer what is open or comes later.
            logger.critical("the engine ends", exc_info=True)
            with suppress(OSError):
                self._tell(self._core.close(FAILURE))
            return False
        return True

    def _step(self) -> Iterable[Emitted]:
        try:
            return self._core.step()
        except self._opened.fatal:
            raise
        except Exception:
            # Whatever else a step raises, the requests in it end with an answer, and the engine
            # goes on with the next ones.
            logger.exception("a step failed; every open request ends with an error")
            return self._core.fail("the engine failed while it ran the model")

    def _read(self) -> None:
        try:
            for message in self._channel:
                self.take(message)
        except OSError:
            pass  # the other end is gone
        except Exception:
            logger.critical("the engine cannot read its calls, and ends", exc_info=True)
        finally:
            self._core.close()

    def take(self, message: ToEngine) -> None:
        """Does what a message asks for, at once: a step may be running in the other thread."""
        match message:
            case Generate(call, request):
                self._open(call, request)
            case Abort(call):
                self._abort(call)
            case Close():
                self._tell(self._core.close())
            case Start():
                raise WireError("an engine is started once")

    def _open(self, call: int, raw: msgspec.Raw) -> None:
        self._sequences[call] = None
        try:
            request = decode_request(raw)
        except msgspec.DecodeError as error:
            self._refuse(call, RequestError(f"the request is wrong: {error}"))
            return
        if request.grammar is None:
            self._admit(call, request)
        else:
            threading.Thread(target=self._admit, args=(call, request), daemon=True).start()

    def _admit(self, call: int, request: TokenRequest) -> None:
        try:
            sequence = self._opened.admit(request, self._opened.info)
            self._reply(Taken(call))
            with self._changing:
                if call not in self._sequences:  # aborted in the meantime
                    return
                # Known before it is added: the first event may come before `add` returns.
                self._sequences[call], self._calls[sequence] = sequence, call
                try:
                    self._core.add(sequence)
                except BaseException:
                    del self._calls[sequence]
                    raise
        except PeriluneError as error:
            self._refuse(call, error)
        except Exception:
            logger.exception("a request could not be taken up")
            self._refuse(call, EngineError("the engine failed when it took the request up"))
        else:
            with suppress(OSError):  # as below
                self._tell(())

    def _refuse(self, call: int, error: PeriluneError) -> None:
        self._sequences.pop(call, None)
        self._reply(Refused(call, pack(error)))

    def _reply(self, message: Taken | Refused) -> None:
        with suppress(OSError):  # the other end is gone, which the reading thread sees as well
            self._channel.send(message)

    def _abort(self, call: int) -> None:
        with self._changing:
            sequence = self._sequences.pop(call, None)
            if sequence is None:
                return
            self._calls.pop(sequence, None)
            self._core.abort(sequence)
        self._tell(())

    def _tell(self, emitted: Iterable[Emitted]) -> None:
        events: list[tuple[int, TokenEvent]] = []
        for item in emitted:
            call = self._calls.get(item.sequence)
            if call is None:  # aborted in the meantime
                continue
            events.append((call, item.event))
            if item.event.finish_reason is not None:
                self._calls.pop(item.sequence, None)
                self._sequences.pop(call, None)
        with self._telling:  # so that the snapshot that is sent last is the latest
            self._send(events, self._core.stats())

    def _send(self, events: list[tuple[int, TokenEvent]], stats: EngineStats) -> None:
        try:
            self._channel.send(Step(events, stats))
        except WireError:
            if len(events) < 2:
                raise
            half = len(events) // 2
            self._send(events[:half], stats)
            self._send(events[half:], stats)
