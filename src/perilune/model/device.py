"""Where a model runs, by the name that a user gives."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from perilune.core.errors import UnsupportedError


def device_of(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU where one is ready, else the CPU.

    Raises:
        UnsupportedError: there is no such device, or this machine cannot use it; it says why.
    """
    why_not = _why_no_gpu() if name == "auto" or name.partition(":")[0] == "cuda" else None
    if name == "auto":
        return torch.device("cpu" if why_not else "cuda")
    if why_not:
        raise UnsupportedError(f"device {name!r} cannot be used: {why_not}")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise UnsupportedError(f"device {name!r} cannot be used: {first_line}") from None


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        built = torch.backends.cuda.is_built()
        return "torch sees no GPU here" if built else "this build of torch is for CPUs only"
    if find_spec("triton") is None:
        return "the kernels for it need triton, which is not installed"
    return None
