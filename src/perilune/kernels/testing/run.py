"""One run of an op: its outputs, in-place changes and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import Results, same_bits
from perilune.kernels.testing.memory import NewMemory, banded


def run(
    op: Callable[..., Any],
    inputs: Inputs,
    *,
    grad: bool,
    always: tuple[str, ...] = (),
    guarded: bool = False,
    around: AbstractContextManager[Any] | None = None,
) -> Results:
    """What `op` makes of `inputs`, which it gets as they are; `around` holds while it runs.

    With `guarded`, what it allocates stands between bands, as do `placed` inputs: a write out of
    bounds must not hit this process's own memory.

    With `grad`, also the gradients of a random projection of its outputs; without, it runs as in
    inference. Inputs named in `always` are reported even if they did not change.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    before = {name: value.detach().clone() for name, value in tensors.items()}
    leaves = {name: value for name, value in tensors.items() if value.requires_grad} if grad else {}
    if around is None:
        around = NewMemory(poisoned=False) if guarded else nullcontext()
    with nullcontext() if grad else torch.inference_mode(), around, _quiet(guarded):
        out = op(**inputs)
        outputs = [out] if isinstance(out, Tensor) else [x for x in out if x is not None]
        if leaves:
            _project(outputs).backward()
    results = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    for name, value in tensors.items():
        if name in always or not same_bits(value, before[name]):
            results[f"after {name}"] = value.detach()
    grads = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
    return results | {what: grad for what, grad in grads.items() if grad is not None}


@contextmanager
def _quiet(guarded: bool) -> Iterator[None]:
    """Triton's interpreter is numpy, which warns of infinities that a kernel masks afterwards."""
    with warnings.catch_warnings():
        if guarded:
            warnings.simplefilter("ignore", RuntimeWarning)
        yield


def placed(inputs: Inputs, device: str, *, grad: bool, guarded: bool = False) -> Inputs:
    """Fresh copies on `device`; leaves that ask for a gradient only with `grad`."""
    return {name: _placed(value, device, grad, guarded) for name, value in inputs.items()}


def _placed(value: Any, device: str, grad: bool, guarded: bool) -> Any:
    if isinstance(value, Tensor):
        copied = value.detach().to(device, copy=True)
        if guarded:
            copied = banded(copied, 0)[1].copy_(copied)
        return copied.requires_grad_(grad and value.requires_grad)
    if isinstance(value, Packing) and value.segment_BL is not None:
        return replace(value, segment_BL=value.segment_BL.to(device))
    return value


def as_double(inputs: Inputs) -> Inputs:
    """Copies in float64, for the truth."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(torch.float64, copy=True).requires_grad_(value.requires_grad)
        return value.clone() if isinstance(value, Tensor) else value

    return {name: convert(value) for name, value in inputs.items()}


def _project(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    terms = [
        (x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
        for x in outputs
        if x.is_floating_point()
    ]
    return torch.stack(terms).sum()
