"""`metrics.jsonl` and the progress bar of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perilune.train.config import TrainConfig
from perilune.train.step import StepResult

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, each an object with a `step`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class RunLog:
    """Writes a line every `log_every` steps; use as a context.

    `first` steps are done already: their lines are kept, later ones (of a run that was stopped
    after its last save) go.
    """

    def __init__(self, out: Path, config: TrainConfig, first: int) -> None:
        path = out / METRICS_FILE
        kept = [m for m in read_metrics(path) if m["step"] <= first] if path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for line in kept:
            self._write(line)
        self._file.flush()
        self._config = config
        self._bar = tqdm(total=config.steps, initial=first, unit="step", desc=config.name)
        self._started, self._first = time.monotonic(), first

    def step(self, step: int, result: StepResult) -> None:
        """Counts a step; reads its values off the device only when they are written."""
        self._bar.update()
        if step % self._config.log_every and step != self._config.steps:
            return
        values = {name: float(value) for name, value in result._asdict().items()}
        seconds = time.monotonic() - self._started
        tokens = (step - self._first) * self._config.tokens_per_step
        self._bar.set_postfix(loss=f"{values['loss']:.3f}")
        self.record(step, {**values, "tokens_per_s": round(tokens / seconds)})

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, **values})
        self._file.flush()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._file.close()
