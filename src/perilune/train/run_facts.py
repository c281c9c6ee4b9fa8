"""`run.json`: what a run was made of, where it ran and how long it took."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perilune.train.checkpoint import Progress
from perilune.train.config import TrainConfig

FACTS_FILE = "run.json"


class RunFacts(NamedTuple):
    recipe: dict[str, Any]
    """The `TrainConfig` as JSON values."""
    device: str
    torch: str
    steps: int
    """Done so far."""
    tokens: int
    """Places in the rows of those steps, padding included."""
    seconds: float
    """Of training, with compilation and validation; pieces of a resumed run added up."""
    epochs: dict[str, float]
    """How often each kind of text was read."""
    ranks: int = 1
    """Processes, when it was saved last."""


def facts_of(
    config: TrainConfig, ranks: int, progress: Progress, epochs: dict[str, float]
) -> RunFacts:
    return RunFacts(
        recipe=config.as_json(),
        device=_device_name(config.device),
        torch=torch.__version__,
        steps=progress.step,
        tokens=progress.step * config.tokens_per_step,
        seconds=round(progress.seconds, 1),
        epochs=epochs,
        ranks=ranks,
    )


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def write_facts(folder: Path, facts: RunFacts) -> None:
    text = json.dumps(facts._asdict(), indent=1) + "\n"
    (folder / FACTS_FILE).write_text(text, encoding="utf-8")


def read_facts(folder: Path) -> RunFacts:
    return RunFacts(**json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")))
