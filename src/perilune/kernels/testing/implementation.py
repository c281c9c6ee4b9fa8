"""What can be checked here: the reference, and the backends whose device, or stand-in, is here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.plugins import RESERVED, Registered, find, load_run
from perilune.kernels.registry import OpSpec, Tolerance, load_attr

REFERENCE = "reference"
_INTERPRET = "TRITON_INTERPRET"


class Implementation(NamedTuple):
    backend: str
    path: str
    """`module:attr`."""
    device: str
    """Where it runs."""
    tolerance: Mapping[torch.dtype, Tolerance]
    """Of each dtype that it serves."""
    interpreted: bool = False
    """Triton's interpreter stands in for the device: it proves the arithmetic, nothing else."""
    plugin: Registered | None = None
    """Of another package."""

    def load(self) -> Callable[..., Any]:
        """The function as it serves."""
        return load_attr(self.path) if self.plugin is None else load_run(self.plugin)

    @property
    def forward_only(self) -> bool:
        """Declared so: it refuses calls that need a gradient."""
        return self.plugin is not None and not self.plugin.plugin.gradients

    def label(self, dtype: torch.dtype) -> str:
        words = [self.backend, "interpreted" if self.interpreted else ""]
        words.append("" if dtype == torch.float32 else str(dtype).removeprefix("torch."))
        return " ".join(word for word in words if word)


def is_here(device: str) -> bool:
    """Whether this machine has a device of that type."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return device == "cpu" or (found is not None and found.type == device)


def is_triton(path: str) -> bool:
    """Whether a backend is written in Triton: its file is named for it."""
    return "triton" in path.partition(":")[0].rpartition(".")[2]


def use_interpreter() -> None:
    """Has Triton run its kernels in plain Python on CPU tensors, in this process.

    Raises:
        UnsupportedError: Triton was imported for a device already; it decides once.
    """
    if os.environ.get(_INTERPRET) == "1":
        return
    if "triton" in sys.modules:
        raise UnsupportedError(f"triton is imported already: set {_INTERPRET}=1 from the outside")
    os.environ[_INTERPRET] = "1"


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def implementations(
    spec: OpSpec, backend: str | None = None, tier: str | None = None
) -> list[Implementation]:
    """What tier `cpu` or `gpu` checks of an op (None: whatever has its device here).

    The cpu tier has the reference, the cpu backend and, in the interpreter, Triton's; the gpu tier
    what serves there: a device type without a backend runs the reference, as in `resolve`. A
    plug-in is checked only where `backend` names it, on every device of it that is here.

    Raises:
        UnsupportedError: a device is asked for that is not here, or a plug-in that cannot be
            checked.
    """
    reference = Implementation(REFERENCE, spec.reference, "cpu", spec.tolerance)
    if backend == REFERENCE:
        return [reference]
    if backend is not None and is_plugin(backend):
        return _of_plugin(spec, find(spec.name, backend), tier)
    if backend is not None:
        if tier == "cpu" and has_triton() and is_triton(spec.backends.get(backend, "")):
            return [_interpreted(spec, backend)]
        if not is_here(backend) or (tier == "cpu" and backend != "cpu"):
            raise UnsupportedError(f"no {backend} device here, so its kernels cannot be checked")
        return [_on(spec, backend)]
    if tier == "cpu":
        own_files = spec.backends.items() if has_triton() else ()
        triton = [device for device, path in own_files if is_triton(path)]
        own = [_on(spec, "cpu")] if "cpu" in spec.backends else []
        return [reference, *own, *(_interpreted(spec, device) for device in triton)]
    if tier == "gpu":
        return implementations(spec, "cuda")
    return [reference, *(_on(spec, device) for device in spec.backends if is_here(device))]


def is_plugin(backend: str) -> bool:
    """Whether a backend of that name comes from another package."""
    return backend not in RESERVED


def _of_plugin(spec: OpSpec, found: Registered, tier: str | None) -> list[Implementation]:
    plugin = found.plugin
    if found.version is None:
        raise UnsupportedError(f"{found.distribution} is not installed: {found.name} needs it")
    here = [each for each in plugin.devices if is_here(each) and (tier != "cpu" or each == "cpu")]
    if not here:
        raise UnsupportedError(
            f"{found} serves {spec.name} on {', '.join(plugin.devices)}: no such device here"
        )
    return [
        Implementation(found.name, plugin.run, each, _bounds(spec, found, each), plugin=found)
        for each in here
    ]


def _bounds(spec: OpSpec, found: Registered, device: str) -> dict[torch.dtype, Tolerance]:
    """The op's own: a plug-in widens none."""
    known = {**spec.tolerance, **spec.backend_tolerance.get(device, {})}
    for missing in (dtype for dtype in found.plugin.dtypes if dtype not in known):
        raise UnsupportedError(f"{found}: {spec.name} has no tolerance for {missing} on {device}")
    return {dtype: known[dtype] for dtype in found.plugin.dtypes}


def _on(spec: OpSpec, device: str) -> Implementation:
    path = spec.backends.get(device, spec.reference)
    return Implementation(device, path, device, spec.backend_tolerance.get(device, spec.tolerance))


def _interpreted(spec: OpSpec, device: str) -> Implementation:
    # The interpreter multiplies the bit patterns of bf16 operands, which means nothing.
    served = (item for item in spec.tolerance.items() if item[0] != torch.bfloat16)
    tolerance = dict(served)
    return Implementation(device, spec.backends[device], "cpu", tolerance, interpreted=True)
