"""Every environment variable that perilune reads, in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from perilune.core.errors import ConfigError


def num_threads() -> int | None:
    """PERILUNE_THREADS: torch threads of the engine; None leaves torch's own choice.

    Raises:
        ConfigError: it is set to something other than a positive whole number.
    """
    value = os.environ.get("PERILUNE_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"PERILUNE_THREADS must be a positive whole number, not {value!r}")
    return int(value)


def cache_dir() -> Path:
    """Perilune's folder under XDG_CACHE_HOME, by default ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune"


def triton_is_interpreted() -> bool:
    """TRITON_INTERPRET: Triton's kernels run in plain Python, on whatever device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_choices() -> dict[str, str]:
    """PERILUNE_KERNELS: from op to the backend that is to serve it, `OP=BACKEND,OP=BACKEND`.

    Raises:
        ConfigError: a part is not of that form, or an op stands there twice.
    """
    choices: dict[str, str] = {}
    for part in filter(None, os.environ.get("PERILUNE_KERNELS", "").split(",")):
        op, _, backend = (word.strip() for word in part.partition("="))
        if not op or not backend:
            raise ConfigError(f"PERILUNE_KERNELS must be OP=BACKEND,OP=BACKEND, not {part!r}")
        if op in choices:
            raise ConfigError(f"PERILUNE_KERNELS chooses a backend for {op} twice")
        choices[op] = backend
    return choices


def api_key() -> str | None:
    """PERILUNE_API_KEY: sent as a bearer token to the server that `bench serve` measures."""
    return os.environ.get("PERILUNE_API_KEY") or None


class Launched(NamedTuple):
    rank: int
    size: int
    local_rank: int
    """Among the processes of this host."""


def launched() -> Launched:
    """RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them: this process among those that it
    launched, which is alone where nobody did.

    Raises:
        ConfigError: one of them is missing, or no whole number.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [os.environ.get(name) for name in names]
    if not any(values):
        return Launched(0, 1, 0)
    for name, value in zip(names, values, strict=True):
        if value is None or not value.isdecimal():
            raise ConfigError(f"{name} must be a whole number beside the others, not {value!r}")
    return Launched(*(int(value or 0) for value in values))
