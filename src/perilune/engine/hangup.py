"""Noticing that the other end of a socket is gone, whatever this process is doing."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable


def when_gone(fd: int, then: Callable[[], None]) -> None:
    """Calls `then` in a thread of its own as soon as the other end of the socket is closed, which
    the end of its process does; what has not been read of it does not matter."""

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # a hang-up is reported unasked
        poll.poll()
        then()

    threading.Thread(target=wait, daemon=True).start()
