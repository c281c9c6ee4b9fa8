"""The engine's end of the connection: blocking, for two threads of which one reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from perilune.engine.wire import Frames, FromEngine, ToEngine, decode_to_engine, frame

_READ_BYTES = 2**16


class Channel:
    """Owns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._sending = threading.Lock()
        self._messages = self._read()

    def __iter__(self) -> Iterator[ToEngine]:
        """Messages as they come, until the other end closes.

        Raises WireError or msgspec.DecodeError for what is no message.
        """
        return self._messages

    def send(self, message: FromEngine) -> None:
        """Blocks while the other end does not read, and so holds at most this one message.

        Raises OSError when the other end is gone.
        """
        data = frame(message)
        with self._sending:
            self._sock.sendall(data)

    def close(self) -> None:
        """Ends the iteration, also in another thread that waits in it."""
        with suppress(OSError):  # the other end was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self) -> Iterator[ToEngine]:
        while data := self._receive():
            for body in self._frames.feed(data):
                yield decode_to_engine(body)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ_BYTES)
        except OSError:  # closed here, or reset by an end that died with frames unread
            return b""
