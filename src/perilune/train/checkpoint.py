"""Resumable training state: a folder a save, with a safetensors file of every rank's part.

A state moves between numbers of ranks: each file says where its pieces lie in the whole tensors,
and whoever reads takes from all files what it holds itself.

    state-00000500/rank-0.safetensors ...   whole or not there: written as state-00000500.partial
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from perilune.core.errors import CheckpointError
from perilune.model.model import Transformer
from perilune.train.data import Cursor
from perilune.train.pieces import PIECES, PieceFiles, Region, metadata_of, region_of
from perilune.train.team import ALONE, Team
from perilune.train.whole_blocks import own_part

_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, beside its tensors."""

    step: int
    """Steps done."""
    seconds: float
    loader: Cursor
    recipe: dict[str, Any]
    """`TrainConfig.as_json` of the run."""
    losses: list[float] = field(default_factory=list)
    """`SpikeGuard.losses`."""
    data: str = ""
    """`shards.fingerprint` of what was trained on."""


def latest(run: Path) -> Path | None:
    """The folder of the last whole state in a run's folder."""
    states = [path for path in run.glob("state-*") if path.suffix != _PARTIAL]
    return max(states, default=None)


def save_state(
    run: Path,
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    progress: Progress,
    team: Team = ALONE,
) -> Path:
    """Writes weights, optimiser state and `progress`; every rank calls it. Returns the folder.

    A crash at any moment leaves the state before or this one; once this one is whole, the one
    before goes.
    """
    folder = run / f"state-{progress.step:08}"
    partial = folder.with_suffix(_PARTIAL)
    if team.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    team.wait()
    pieces: dict[str, Tensor] = {}
    regions: dict[str, Region] = {}
    for name, value in _named(model, optimizers):
        own = own_part(value)
        # What is not shared out is the same everywhere, and written once.
        if isinstance(value, DTensor):
            regions[name] = region_of(value)
        elif team.rank:
            continue
        if own.numel() or not regions.get(name):
            pieces[name] = own.detach().contiguous().cpu()
    metadata = {PIECES: metadata_of({k: v for k, v in regions.items() if k in pieces})}
    if team.rank == 0:
        metadata["progress"] = msgspec.json.encode(progress).decode()
    path = partial / f"rank-{team.rank}.safetensors"
    save_file(pieces, path, metadata=metadata)
    _sync(path)
    team.wait()
    if team.rank == 0:
        _sync(partial)
        partial.rename(folder)
        _sync(run)
        for other in run.glob("state-*"):
            if other != folder:
                shutil.rmtree(other)
    team.wait()
    return folder


def load_state(run: Path, model: Transformer, optimizers: list[torch.optim.Optimizer]) -> None:
    """Restores the tensors of the last state; every rank its own part of them.

    Raises:
        CheckpointError: no state, a damaged one, or tensors that do not fit the model.
    """
    with PieceFiles(_needed(run)) as files:
        _check_fit(files, model.state_dict())
        with torch.no_grad():
            for name, value in model.state_dict().items():
                own_part(value).copy_(files.read(f"model.{name}", region_of(value)))
        names = {p: name for name, p in model.named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state = _optimizer_state(files, names[p], p)
                    if state:  # a parameter without a gradient never had one
                        optimizer.state[p] = state


def read_progress(run: Path) -> Progress:
    """The `progress` that `save_state` was given.

    Raises:
        CheckpointError: no state, a damaged one, or one that does not tell its progress.
    """
    path = _needed(run)
    with PieceFiles(path) as files:
        text = files.metadata.get("progress")
    if text is None:
        raise CheckpointError(f"{path} is no state of a run: its metadata has no `progress`")
    try:
        return msgspec.json.decode(text, type=Progress)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no state of a run: `progress`: {error}") from None


def _named(
    model: Transformer, optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        yield f"model.{name}", value
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            for kind, value in values.items():
                yield f"optim.{kind}.{names[p]}", torch.as_tensor(value)


def _optimizer_state(files: PieceFiles, name: str, p: Tensor) -> dict[str, Tensor]:
    state = {}
    for key in files.keys_of(name):
        kind = key.removeprefix("optim.").removesuffix(f".{name}")
        if files.shape(key) != tuple(p.shape) or p.ndim == 0:
            whole = files.read(key, Region.all(files.shape(key)))
            state[kind] = whole if whole.ndim == 0 else whole.to(p.device)
            continue
        value = torch.empty_like(p, requires_grad=False)
        own_part(value).copy_(files.read(key, region_of(p)))
        state[kind] = value
    return state


def _needed(run: Path) -> Path:
    path = latest(run)
    if path is None:
        raise CheckpointError(f"nothing to resume from: there is no state in {run}")
    return path


def _check_fit(files: PieceFiles, wanted: dict[str, Tensor]) -> None:
    found = {key.removeprefix("model.") for key in files.names if key.startswith("model.")}
    for name in sorted(found ^ wanted.keys()):
        problem = "is missing" if name in wanted else "is not in this model"
        raise CheckpointError(f"{files.folder} belongs to another model: {name} {problem}")
    for name, value in wanted.items():
        shape = files.shape(f"model.{name}")
        if shape != tuple(value.shape):
            raise CheckpointError(
                f"{files.folder} belongs to another model: {name} is {list(shape)}, "
                f"not {list(value.shape)}"
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
