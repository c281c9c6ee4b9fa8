"""Starting the engine's process, and seeing it end.

A plain `python -m` and no `multiprocessing`: that would run the caller's main module again in the
child, and keep a helper process of its own beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

ENGINE = "perilune.engine.process"
_POLL_S = 0.005
_KILL_S = 10.0
"""How long a killed process may take to go: what it holds may be in a driver's hands."""


class EngineProcess:
    """A child, and `sock`, our end of the socket to it, which belongs to the caller."""

    def __init__(self, module: str = ENGINE, pass_fds: Sequence[int] = ()) -> None:
        """Runs `module`, whose argument is the other end's descriptor; it inherits `pass_fds`.

        Raises OSError when no process or socket can be had.
        """
        self.sock, theirs = socket.socketpair()
        try:
            # In a socket without a name nobody else can get in between. Only the child's end is
            # handed on, so that it sees ours close, and we see its.
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *pass_fds],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints is no answer of ours
                    # The child has to import what we have imported, wherever that came from.
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self.sock.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def ended(self, within_s: float) -> str:
        """Waits for the end, and brings it about after `within_s`; says how it came."""
        if not await self._wait(within_s):
            self.kill()
            if not await self._wait(_KILL_S):
                return "cannot be killed"
        code = self._process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    async def _wait(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while self._process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True
