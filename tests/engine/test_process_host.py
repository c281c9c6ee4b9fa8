"""The engine's end of the wire, spoken to in frames."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
from process_cores import CountingCore, open_core

from perilune.core.errors import OverloadedError
from perilune.core.types import Grammar, TokenRequest
from perilune.engine import wire
from perilune.engine.channel import Channel
from perilune.engine.host import EngineHost, Opened

MANY = 5_000


class Peer:
    """The other end, which reads only when it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = wire.Frames()
        self._bodies: list[bytes] = []

    def send(self, message: wire.ToEngine) -> None:
        self.sock.sendall(wire.frame(message))

    def generate(self, call: int, request: TokenRequest) -> None:
        self.sock.sendall(wire.request_frame(call, request))

    def receive(self) -> wire.FromEngine:
        while not self._bodies:
            data = self.sock.recv(2**16)
            assert data, "the engine has closed its end"
            self._bodies += self._frames.feed(data)
        return wire.decode_from_engine(self._bodies.pop(0))

    def until(self, condition: Callable[[wire.FromEngine], bool]) -> list[wire.FromEngine]:
        seen = [self.receive()]
        while not condition(seen[-1]):
            seen.append(self.receive())
        return seen


@contextmanager
def hosted(opened: Opened) -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    channel = Channel(theirs)
    thread = threading.Thread(target=EngineHost(channel, opened).run)
    thread.start()
    try:
        peer = Peer(ours)
        assert isinstance(peer.receive(), wire.Hello)
        yield peer
    finally:
        ours.close()
        thread.join(30)
        assert not thread.is_alive()
        channel.close()


def request_of(*prompt_ids: int, max_tokens: int = 3, **fields) -> TokenRequest:
    return TokenRequest(request_id="r", prompt_ids=prompt_ids, max_tokens=max_tokens, **fields)


def ended(call: int) -> Callable[[wire.FromEngine], bool]:
    def is_end(message: wire.FromEngine) -> bool:
        return isinstance(message, wire.Step) and any(
            i == call and event.finish_reason for i, event in message.events
        )

    return is_end


def test_the_events_of_a_step_come_in_one_frame() -> None:
    opened = open_core(step_s=0.01)
    with hosted(opened) as peer:
        for call in range(8):
            peer.generate(call, request_of(call, max_tokens=5))
        sizes = [len(m.events) for m in peer.until(ended(7)) if isinstance(m, wire.Step)]
    assert max(sizes) == 8


def test_while_nobody_reads_the_engine_waits_and_holds_nothing_back() -> None:
    opened = open_core()
    core = opened.core
    assert isinstance(core, CountingCore)
    with hosted(opened) as peer:
        peer.generate(0, request_of(1, max_tokens=MANY))
        num_steps, until_s = -1, time.monotonic() + 60
        while core.num_steps != num_steps:  # until it stands
            assert time.monotonic() < until_s
            num_steps = core.num_steps
            time.sleep(0.3)
        assert 0 < num_steps < MANY / 2, "more than a socket holds is waiting"
        events = [e for m in peer.until(ended(0)) if isinstance(m, wire.Step) for e in m.events]
    assert len(events) == MANY


def test_events_that_one_frame_cannot_hold_come_in_several(monkeypatch) -> None:
    with hosted(open_core(step_s=0.01)) as peer:
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 700)
        for call in range(20):
            peer.generate(call, request_of(call, max_tokens=4))
        ends, frames = set(), 0
        while len(ends) < 20:
            message = peer.receive()
            if isinstance(message, wire.Step):
                frames += 1
                ends |= {call for call, event in message.events if event.finish_reason}
    assert frames > 20


def test_a_grammar_that_is_being_compiled_holds_up_nobody() -> None:
    compiling, compiled = threading.Event(), threading.Event()
    opened = open_core()
    plain = opened.admit

    def admit(request, info):
        if request.grammar is not None:
            compiling.set()
            assert compiled.wait(30)
        return plain(request, info)

    with hosted(replace(opened, admit=admit)) as peer:
        for call in (0, 1):
            peer.generate(call, request_of(1, grammar=Grammar(text="start: /a/")))
        assert compiling.wait(30)
        peer.generate(2, request_of(2))
        peer.until(ended(2))
        peer.send(wire.Abort(0))
        peer.generate(3, request_of(3))
        peer.until(ended(3))  # so the abort has been read
        compiled.set()
        seen = peer.until(ended(1))
        peer.generate(4, request_of(3))
        seen += peer.until(ended(4))
    assert not any(call == 0 for m in seen if isinstance(m, wire.Step) for call, _ in m.events)
    assert not opened.core.running


def test_a_refused_call_is_never_said_to_be_refused_and_ended() -> None:
    with hosted(open_core(max_open=1, step_s=0.001)) as peer:
        peer.generate(0, request_of(1, max_tokens=50))
        peer.generate(1, request_of(1))
        messages = peer.until(ended(0))
    [refused] = [m for m in messages if isinstance(m, wire.Refused)]
    assert (refused.call, refused.error.kinds[0]) == (1, OverloadedError.__name__)
    assert not any(call == 1 for m in messages if isinstance(m, wire.Step) for call, _ in m.events)


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 8, wire.frame(wire.Start("", "", {})), (1).to_bytes(4, "big") + b"\xc1"],
    ids=["length", "second start", "no message"],
)
def test_a_peer_that_talks_nonsense_ends_the_engine(data, caplog) -> None:
    opened = open_core()
    with hosted(opened) as peer:
        peer.sock.sendall(data)
        until_s = time.monotonic() + 30
        while not opened.core.closed:
            assert time.monotonic() < until_s
            time.sleep(0.001)
    assert "cannot read its calls" in caplog.text


def test_an_admission_that_fails_is_told_and_harms_nobody(caplog) -> None:
    opened = open_core()

    def admit(request, info):
        if request.prompt_ids == (13,):
            raise MemoryError("too much")
        return opened.admit(request, info)

    with hosted(replace(opened, admit=admit)) as peer:
        peer.generate(0, request_of(13))
        [*_, refused] = peer.until(lambda m: isinstance(m, wire.Refused))
        assert refused.error.kinds[0] == "EngineError"
        peer.generate(1, request_of(1))
        peer.until(ended(1))
    assert "too much" in caplog.text


def test_aborting_what_has_ended_or_never_was_is_nothing() -> None:
    with hosted(open_core()) as peer:
        peer.generate(0, request_of(1))
        peer.until(ended(0))
        for call in (0, 5):
            peer.send(wire.Abort(call))
        peer.generate(1, request_of(1))
        peer.until(ended(1))


def test_nothing_of_a_call_stays_behind() -> None:
    opened, seen = open_core(step_s=0.001, max_open=2), []

    def admit(request, info):
        sequence = opened.admit(request, info)
        seen.append(weakref.ref(sequence))
        return sequence

    with hosted(replace(opened, admit=admit)) as peer:
        peer.generate(0, request_of(1))
        peer.until(ended(0))
        peer.generate(1, request_of(2, max_tokens=MANY))
        peer.send(wire.Abort(1))
        for call in (2, 3, 4):  # the last one is refused
            peer.generate(call, request_of(3, max_tokens=MANY))
        peer.until(lambda m: isinstance(m, wire.Refused))
        for call in (2, 3):
            peer.send(wire.Abort(call))
        peer.generate(5, request_of(4))
        peer.until(ended(5))
        until_s = time.monotonic() + 30
        while any(sequence() for sequence in seen):
            assert time.monotonic() < until_s
            gc.collect()
        assert len(seen) == 6


def test_frames_of_two_threads_do_not_mix() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    message = wire.Failed(wire.ErrorOnWire((), "x" * 2**20, {}))
    threads = [
        threading.Thread(target=lambda: [channel.send(message) for _ in range(10)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    peer = Peer(ours)
    assert [peer.receive() for _ in range(20)] == [message] * 20
    for thread in threads:
        thread.join()
    ours.close()
    channel.close()


def test_close_ends_every_call_in_one_frame() -> None:
    with hosted(open_core(step_s=0.005)) as peer:
        for call in range(3):
            peer.generate(call, request_of(call, max_tokens=MANY))
        peer.until(lambda m: isinstance(m, wire.Step) and len(m.events) == 3)
        peer.send(wire.Close())
        *_, last = peer.until(ended(0))
        assert {event.error for _, event in last.events} == {"the engine is shutting down"}
        assert len(last.events) == 3


def test_a_request_without_a_field_is_refused_by_its_number() -> None:
    with hosted(open_core()) as peer:
        raw = msgspec.Raw(msgspec.msgpack.encode({"request_id": "r"}))
        peer.send(wire.Generate(9, raw))
        [*_, refused] = peer.until(lambda m: isinstance(m, wire.Refused))
        assert refused.call == 9
        assert "prompt_ids" in refused.error.message
