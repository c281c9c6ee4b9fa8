"""Resumable training state: one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.model.model import Transformer

FILE = "train_state.safetensors"


def save_state(
    directory: Path,
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
) -> None:
    """Writes weights, optimiser state and `progress` (JSON) to `directory`/train_state.safetensors."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for key, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                tensors[f"optim.{index}.{key}.{name}"] = torch.as_tensor(value)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / (FILE + ".partial")
    contiguous = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    save_file(contiguous, partial, metadata={"progress": json.dumps(progress)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(directory / FILE)


def load_state(
    directory: Path, model: Transformer, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restores what `save_state` wrote and returns its `progress`; no optimisers: weights only.

    Raises:
        CheckpointError: no such file, or tensors that do not fit the model.
    """
    path = directory / FILE
    if not path.exists():
        raise CheckpointError(f"nothing to resume from: {path} does not exist")
    weights: dict[str, Tensor] = {}
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            kind, _, rest = key.partition(".")
            if kind == "model":
                weights[rest] = file.get_tensor(key)
                continue
            if not optimizers:
                continue
            index, number, name = rest.split(".", 2)
            states[int(index)].setdefault(int(number), {})[name] = file.get_tensor(key)
        progress = json.loads(file.metadata()["progress"])
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model: {error}") from None
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return progress
