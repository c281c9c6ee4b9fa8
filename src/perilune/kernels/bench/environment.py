"""Where a result was measured: what has to be equal before two may be compared, and the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from perilune.core.errors import UnsupportedError

COMPARABLE = ("gpu", "driver", "triton")
"""Medians measured under other values of these say nothing about a change of the code."""
_CPUINFO = Path("/proc/cpuinfo")


def environment(
    device: torch.device, peers: Mapping[str, str], commit: str | None
) -> dict[str, Any]:
    """The `env` of a result file; `gpu` names the CPU and its threads where there is no GPU."""
    return {
        "gpu": device_name(device),
        "driver": driver(device),
        "torch": torch.__version__,
        "triton": _triton(),
        "peers": dict(peers),
        "commit": commit or head_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU: {_cpu_model()}, {torch.get_num_threads()} thread(s)"


def _cpu_model() -> str:
    text = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def gpu_id(device: torch.device) -> str | None:
    """As nvidia-smi wants it; None without a GPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def driver(device: torch.device) -> str | None:
    """Version of the GPU's driver, None where nothing tells it."""
    path, gpu = shutil.which("nvidia-smi"), gpu_id(device)
    if path is None or gpu is None:
        return None
    command = [path, "--query-gpu=driver_version", "--format=csv,noheader", f"--id={gpu}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def head_commit() -> str | None:
    """Of the source that runs, marked when it was edited since; None outside a repository."""
    git, here = shutil.which("git"), Path(__file__).parent
    if git is None:
        return None
    # A hook's variables would name another repository.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def ask(*command: str) -> str | None:
        done = subprocess.run(
            [git, "-C", str(here), *command],
            capture_output=True,
            text=True,
            check=False,
            env=variables,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    head = ask("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("-edited" if ask("status", "--porcelain", "--", str(here.parent)) else "")


def require_comparable(stored: Mapping[str, Any], here: Mapping[str, Any], file: Path) -> None:
    """Raises:
    UnsupportedError: a stored result was measured on another GPU, driver or Triton.
    """
    for key in COMPARABLE:
        if stored.get(key) != here[key]:
            raise UnsupportedError(
                f"{file} was measured with {key} {stored.get(key)!r}, and here it is"
                f" {here[key]!r}: the times cannot be compared"
            )
