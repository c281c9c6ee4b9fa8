"""The front starts on a machine without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "perilune.core.fakes",
        "perilune.telemetry.metrics",
        "perilune.gateway.server",
        "perilune.gateway.backends.local",
    ],
)
def test_without_torch(module):
    script = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
