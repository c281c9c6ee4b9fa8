"""A profile of a few steps: a trace for chrome://tracing or Perfetto, and a table of operators."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_BEFORE = 2
"""Steps that warm up, of which one is profiled and thrown away."""


@contextmanager
def profiled(folder: Path, num_steps: int) -> Generator[Callable[[], None]]:
    """Gives what is to be called after every step. Writes `trace.json` and `operators.txt` into
    `folder` once `num_steps` were profiled; 0: nothing is."""
    if not num_steps:
        yield lambda: None
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def write(found: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / "trace.json"))
        key = "self_cuda_time_total" if len(activities) > 1 else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=key, row_limit=50)
        (folder / "operators.txt").write_text(table, encoding="utf-8")

    plan = schedule(wait=_BEFORE - 1, warmup=1, active=num_steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:
        yield profiler.step
