"""How processes that tests have started end."""

from __future__ import annotations

import os
import select


def exited(pid: int) -> bool:
    """Whether a process that is no child of ours is gone, or will be within a minute."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 60)[0])
    finally:
        os.close(fd)
