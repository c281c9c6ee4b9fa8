"""Messages and frames: what is sent arrives, however it is cut, and what is none is refused."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perilune
from perilune.core.errors import EngineError, OverloadedError, PeriluneError, RequestError
from perilune.core.types import (
    EngineInfo,
    EngineStats,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    TokenRequest,
)
from perilune.engine import wire
from perilune.engine.errors import EngineRestartingError, WireError
from perilune.engine.wire_errors import pack, unpack

INFO = EngineInfo(
    model_id="m", vocab_size=9, max_context=5, eos_ids=frozenset({1}), details={"device": "cpu"}
)
EVENT = TokenEvent(
    request_id="r", token_id=3, logprob=TokenLogprob(3, -0.5, ((3, -0.5), (4, float("-inf"))))
)
MESSAGES = [
    wire.Hello(wire.VERSION, INFO),
    wire.Failed(pack(RequestError("no", param="p"))),
    wire.Taken(7),
    wire.Refused(7, pack(OverloadedError("full", retry_after_s=2.5))),
    wire.Step([(0, EVENT), (2**40, EVENT)], EngineStats(num_running=2, failure="x")),
    wire.Step([], EngineStats()),
]


@given(cuts=st.lists(st.integers(0, 2000), max_size=12).map(sorted))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    stream = b"".join(map(wire.frame, MESSAGES))
    frames, taken = wire.Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        taken += [wire.decode_from_engine(body) for body in frames.feed(stream[start:end])]
    assert taken == MESSAGES


@given(st.binary(max_size=300))
def test_noise_is_no_message(noise: bytes) -> None:
    frames = wire.Frames()
    try:
        for body in frames.feed(noise):
            wire.decode_to_engine(body)
    except (WireError, msgspec.DecodeError):
        pass


def test_a_request_arrives_as_it_was() -> None:
    request = TokenRequest(
        request_id="r\u00e9",
        prompt_ids=tuple(range(100_000, 300_000)),
        max_tokens=2**40,
        stop_ids=frozenset({1, 2**31}),
        sampling=SamplingParams(seed=2**64 - 1, logit_bias={5: -1.5}, temperature=0),
    )
    [body] = wire.Frames().feed(wire.request_frame(4, request))
    message = wire.decode_to_engine(body)
    assert isinstance(message, wire.Generate)
    assert message.call == 4
    assert wire.decode_request(message.request) == request


def test_a_field_that_one_side_does_not_know_is_no_obstacle() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(TokenRequest):
        added: dict[str, Any]

    later = Later(request_id="r", prompt_ids=(1,), max_tokens=1, added={"kind": ["x"]})
    now = TokenRequest(request_id="r", prompt_ids=(1,), max_tokens=1)
    assert wire.decode_request(msgspec.msgpack.encode(later)) == now


def test_a_length_that_no_frame_has_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(WireError, match="4294967295 bytes"):
        list(wire.Frames().feed(b"\xff\xff\xff\xff"))


def test_a_message_that_no_frame_holds_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 50)
    with pytest.raises(WireError, match="a frame holds 50"):
        wire.frame(MESSAGES[4])


def test_every_error_crosses_with_its_class_and_fields() -> None:
    for module in pkgutil.walk_packages(perilune.__path__, "perilune."):
        if module.name.endswith(".errors"):
            importlib.import_module(module.name)
    waiting: list[type[PeriluneError]] = [PeriluneError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        error = kind.__new__(kind, "what is wrong")
        vars(error).update(param="p", code="c", retry_after_s=1.5, extra=3)
        came = unpack(pack(error))
        assert type(came) is kind
        assert (str(came), vars(came)) == ("what is wrong", vars(error))


def test_an_error_of_an_unknown_class_becomes_its_nearest_known_base() -> None:
    packed = pack(EngineRestartingError("soon", retry_after_s=3.0))
    stranger = wire.ErrorOnWire(("NewerError", *packed.kinds), packed.message, packed.fields)
    assert type(unpack(stranger)) is EngineRestartingError
    assert type(unpack(wire.ErrorOnWire(("Exception",), "odd", {}))) is EngineError


def test_errors_from_outside_that_a_command_can_tell() -> None:
    missing = unpack(pack(ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert isinstance(missing, ModuleNotFoundError)
    assert missing.name == "torch"
    unreadable = unpack(pack(PermissionError(13, "Permission denied", "/weights")))
    assert isinstance(unreadable, OSError)
    assert str(unreadable) == "/weights: Permission denied"


def test_the_servers_process_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None;"
        "import perilune.engine.supervisor, perilune.engine.client, perilune.cli.serve"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
