"""What the gateway's process and the engine's say to each other: messages in frames.

A frame is a length in four bytes, big-endian, and so many bytes of msgpack: one message. The core
types cross field by field under their names, so a field that one of them gains needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from perilune import __version__
from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.errors import WireError

VERSION = f"{__version__}, wire 1"
"""Both ends have to be of one version: an upgrade in place may start a newer engine."""

MAX_FRAME_BYTES = 2**26
"""A prompt of ten million tokens fits; what claims more is no frame."""

_PREFIX_BYTES = 4


class ErrorOnWire(msgspec.Struct, frozen=True):
    """An exception, as `wire_errors` writes and reads it."""

    kinds: tuple[str, ...]
    """Its class and the bases of that, the nearest first: the reader may not know them all."""
    message: str
    fields: Mapping[str, Any]


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first frame: which engine this is to be."""

    version: str
    factory: str
    """`module:function`, which returns an `Opened`."""
    options: Mapping[str, Any]
    """Its keyword arguments, which arrive there as what its annotations say."""


class Generate(msgspec.Struct, tag=True, frozen=True):
    call: int
    """A number of the client's choice, new for each call."""
    request: msgspec.Raw
    """A `TokenRequest`; read apart, so that a wrong one is refused by its number."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Nobody reads the call any more. One that has ended is left alone."""

    call: int


class Close(msgspec.Struct, tag=True, frozen=True):
    """Every open call ends with an `error` event, and then the engine."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The engine is ready."""

    version: str
    info: EngineInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not be started. Nothing follows."""

    error: ErrorOnWire


class Taken(msgspec.Struct, tag=True, frozen=True):
    """The call is about to reach the model. Before, it cannot have been what ends the engine."""

    call: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The call was not admitted. Nothing follows for it."""

    call: int
    error: ErrorOnWire


class Step(msgspec.Struct, tag=True, frozen=True):
    """All events of one step, by call, and how the engine stands after it."""

    events: list[tuple[int, TokenEvent]]
    stats: EngineStats


ToEngine = Start | Generate | Abort | Close
FromEngine = Hello | Failed | Taken | Refused | Step

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_request = msgspec.msgpack.Decoder(TokenRequest).decode


def frame(message: msgspec.Struct) -> bytes:
    """Raises WireError for a message that no frame holds."""
    buffer = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, buffer, _PREFIX_BYTES)
    size = len(buffer) - _PREFIX_BYTES
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a message of {size} bytes; a frame holds {MAX_FRAME_BYTES}")
    buffer[:_PREFIX_BYTES] = size.to_bytes(_PREFIX_BYTES, "big")
    return bytes(buffer)


def request_frame(call: int, request: TokenRequest) -> bytes:
    """The frame of a `Generate`.

    Raises:
        WireError: no frame holds the request.
        TypeError, ValueError, OverflowError: a value in it has no form in msgpack.
    """
    return frame(Generate(call, msgspec.Raw(_encoder.encode(request))))


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies that are complete now. Raises WireError for a length that no frame has."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _PREFIX_BYTES:
            size = int.from_bytes(buffer[:_PREFIX_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes; the most is {MAX_FRAME_BYTES}")
            end = _PREFIX_BYTES + size
            if len(buffer) < end:
                return
            body = bytes(buffer[_PREFIX_BYTES:end])
            del buffer[:end]
            yield body
