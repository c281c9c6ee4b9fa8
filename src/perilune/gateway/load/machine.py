"""What the load test ran on, for whoever compares its numbers."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_VERSIONED = ("perilune", "aiohttp", "uvloop", "msgspec")


def this_machine() -> dict[str, str]:
    """CPU, cores this process may use, memory, GPUs with their driver, system."""
    facts = {
        "cpu": f"{_cpu_model()}, {_num_cores()} cores",
        "memory": _memory(),
        "gpu": _gpus(),
        "system": platform.platform(),
    }
    return {name: fact for name, fact in facts.items() if fact}


def versions() -> dict[str, str]:
    """Of the load generator, not of the server."""
    return {"python": platform.python_version(), **{name: version(name) for name in _VERSIONED}}


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    found = _search(_CPUINFO, r"^model name\s*:\s*(.+)$")
    return found or platform.processor() or platform.machine()


def _memory() -> str:
    kib = _search(_MEMINFO, r"^MemTotal:\s*(\d+) kB$")
    return f"{int(kib) / 2**20:.1f} GiB" if kib else ""


def _search(path: Path, pattern: str) -> str:
    if not path.exists():
        return ""
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip() if found else ""


def _gpus() -> str:
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    command = [path, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""
