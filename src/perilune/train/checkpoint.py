"""Resumable training state: one safetensors file, written whole or not at all."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.model.model import Transformer
from perilune.train.data import Cursor

FILE = "train_state.safetensors"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, beside its tensors."""

    step: int
    """Steps done."""
    seconds: float
    loader: Cursor
    recipe: dict[str, Any]
    """`TrainConfig.as_json` of the run."""


def save_state(
    directory: Path,
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Writes weights, optimiser state and `progress` to `directory`/train_state.safetensors.

    A crash at any moment leaves the state before or this one.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for key, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                tensors[f"optim.{index}.{key}.{name}"] = torch.as_tensor(value)
    partial = directory / (FILE + ".partial")
    contiguous = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    save_file(contiguous, partial, metadata={"progress": msgspec.json.encode(progress).decode()})
    _sync(partial)
    partial.replace(directory / FILE)
    _sync(directory)


def load_state(
    directory: Path, model: Transformer, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Restores the tensors that `save_state` wrote.

    Raises:
        CheckpointError: no such file, a damaged one, or tensors that do not fit the model.
    """
    path = directory / FILE
    tensors = _read(path)
    weights = {name: value for (kind, name), value in tensors.items() if kind == "model"}
    _check_fit(path, weights, model.state_dict())
    model.load_state_dict(weights)
    for index, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for (kind, rest), value in tensors.items():
            if kind == "optim" and rest.startswith(f"{index}."):
                _, number, name = rest.split(".")
                state[int(number)][name] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": dict(state), "param_groups": groups})


def read_progress(directory: Path) -> Progress:
    """The `progress` that `save_state` was given.

    Raises:
        CheckpointError: no such file, a damaged one, or one that does not tell its progress.
    """
    path = directory / FILE
    with _opened(path) as file:
        text = (file.metadata() or {}).get("progress")
    if text is None:
        raise CheckpointError(f"{path} is no state of a run: its metadata has no `progress`")
    try:
        return msgspec.json.decode(text, type=Progress)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no state of a run: `progress`: {error}") from None


def _read(path: Path) -> dict[tuple[str, str], Tensor]:
    tensors = {}
    with _opened(path) as file:
        for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            kind, _, rest = key.partition(".")
            tensors[kind, rest] = file.get_tensor(key)
    return tensors


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"nothing to resume from: {path} does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _check_fit(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        problem = "is missing" if name in wanted else "is not in this model"
        raise CheckpointError(f"{path} belongs to another model: {name} {problem}")
    for name, value in wanted.items():
        if found[name].shape != value.shape:
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {list(found[name].shape)}, "
                f"not {list(value.shape)}"
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
