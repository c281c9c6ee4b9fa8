"""`metrics.jsonl` and the progress bar of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perilune.core.whole_file import write_whole
from perilune.train.config import TrainConfig
from perilune.train.meter import Meter
from perilune.train.step import StepResult
from perilune.train.team import ALONE, Team

METRICS_FILE = "metrics.jsonl"
CLOCKED = ("seconds", "tokens_per_s", "tflops", "mfu")
"""Keys whose values another run of the same recipe does not repeat."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, each an object with a `step`.

    Text behind the last newline is a line that a killed run did not finish, and is left out.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


class RunLog:
    """Writes a line every `log_every` steps, on the first rank; use as a context.

    `first` steps are done already, in `seconds`: their lines are kept, later ones (of a run that
    was stopped after its last save) go.
    """

    def __init__(
        self, out: Path, config: TrainConfig, first: int, seconds: float, team: Team = ALONE
    ) -> None:
        path = out / METRICS_FILE
        self._is_mine = team.rank == 0
        if self._is_mine:
            kept = [m for m in read_metrics(path) if m["step"] <= first] if path.exists() else []
            write_whole(path, "".join(map(_line, kept)).encode())
        self._file = (path if self._is_mine else Path(os.devnull)).open("a", encoding="utf-8")
        self._config = config
        self._bar = tqdm(
            total=config.steps,
            initial=first,
            unit="step",
            desc=config.name,
            disable=not self._is_mine,
        )
        self._started = time.monotonic() - seconds

    def step(self, step: int, result: StepResult, meter: Meter) -> None:
        """Counts a step; reads its values off the device only when they are written. A step that
        was left out is always written."""
        self._bar.update()
        is_due = step % self._config.log_every == 0 or step == self._config.steps
        if not is_due and result.spike is None:
            return
        values = {name: float(value) for name, value in result.scalars().items()}
        rates = meter.read()
        shown = {"loss": f"{values['loss']:.3f}", "tok/s": f"{rates['tokens_per_s']:,.0f}"}
        if "mfu" in rates:
            shown["MFU"] = f"{rates['mfu']:.1%}"
        self._bar.set_postfix(shown)
        spike = {} if result.spike is None else {"spike": result.spike}
        self.record(step, {**values, **spike, "seconds": round(self.seconds(), 2), **rates})

    def record(self, step: int, values: Mapping[str, float | str]) -> None:
        self._file.write(_line({"step": step, **values}))
        self._file.flush()

    def sync(self) -> None:
        """Returns when everything that was written is on the disk."""
        if self._is_mine:
            os.fsync(self._file.fileno())

    def seconds(self) -> float:
        """Of the run so far, its earlier pieces included."""
        return time.monotonic() - self._started

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._file.close()


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values) + "\n"
