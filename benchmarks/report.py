"""What the scripts of this folder say of a run, and where they leave it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(*packages: str) -> dict[str, Any]:
    """Of a run on the CPU."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {package: version(package) for package in packages},
        "python": platform.python_version(),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def keep(result: dict[str, Any], path: Path | None) -> None:
    """Prints a result, and writes it."""
    text = json.dumps(result, indent=1)
    print(text)
    if path:
        path.write_text(text + "\n")
