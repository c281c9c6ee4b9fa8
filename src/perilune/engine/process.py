"""The engine's process: `python -m perilune.engine.process FD`, where FD is a connected socket.

`launch` starts it. It needs nothing else: the first frame says which engine it is to be, and the
end of the connection, which is the end of the process that started it, ends it wherever it is.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, get_type_hints

from msgspec import convert

from perilune.core.errors import EngineError
from perilune.engine.channel import Channel
from perilune.engine.errors import WireError
from perilune.engine.hangup import when_gone
from perilune.engine.host import EngineHost, Opened
from perilune.engine.wire import VERSION, Failed, Start
from perilune.engine.wire_errors import CROSSING, pack

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""The stepping thread asks for Python's lock after every torch op; while the other one takes a long
prompt up, each time costs so much. Python's own 5 ms make steps of seconds."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or an init system sends these to the whole group: the gateway's process drains
        # its streams first, and then closes this one.
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="perilune: %(levelname)s: %(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # in a child of ours it would outlive us, and hide our end
    when_gone(sock.fileno(), lambda: os._exit(0))
    channel = Channel(sock)
    start = next(iter(channel), None)
    if not isinstance(start, Start):
        return 1
    opened = _open(start, channel)
    if opened is None:
        return 1
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what is loaded stays: going through it holds every stream up
    if not EngineHost(channel, opened).run():
        os._exit(1)  # a lost device can hold up an orderly end, and the next engine waits for it
    return 0


def _open(start: Start, channel: Channel) -> Opened | None:
    """None when it failed and the other end has been told why."""
    try:
        if start.version != VERSION:
            raise WireError(
                f"the engine's process is of {VERSION!r}, the server of {start.version!r}: "
                "restart the server"
            )
        return _made(start.factory, start.options)
    except CROSSING as error:
        channel.send(Failed(pack(error)))
    except Exception as error:
        logger.exception("the engine could not be started")
        reason = f"the engine could not be started: {type(error).__name__}: {error}"
        channel.send(Failed(pack(EngineError(reason))))
    return None


def _made(path: str, options: Mapping[str, Any]) -> Opened:
    module, _, name = path.partition(":")
    factory = getattr(importlib.import_module(module), name)
    types = get_type_hints(factory)
    return factory(**{key: convert(value, types.get(key, Any)) for key, value in options.items()})


if __name__ == "__main__":
    sys.exit(main())
