"""Conformance: an implementation against the truth, in outputs, states and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs, OpSpec, load_attr


class CheckResult(NamedTuple):
    op: str
    case: str
    backend: str
    what: str
    """Which output, mutated input or gradient."""
    error: float
    """||x - truth|| / ||truth||, in float64."""
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN and infinities never pass."""
    got, want = got.double(), want.double()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.norm())
    gap = float((got - want).norm())
    return gap / scale if scale else gap


def check(spec: OpSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[CheckResult]:
    """Every case of the reference and of the CPU backend against the float64 oracle."""
    yield from check_backend(spec, "reference", spec.reference, dtype, seed)
    if "cpu" in spec.backends:
        yield from check_backend(spec, "cpu", spec.backends["cpu"], dtype, seed)


def check_backend(
    spec: OpSpec, backend: str, path: str, dtype: torch.dtype, seed: int
) -> Iterator[CheckResult]:
    """Every case of one implementation, named by `module:attr`."""
    truth = load_attr(spec.oracle or spec.reference)
    run = load_attr(path)
    for index, (name, make) in enumerate(spec.cases.items()):
        generator = torch.Generator().manual_seed(seed * 1000 + index)
        inputs = make(generator, dtype)
        want = _run(truth, _as_double(inputs))
        got = _run(run, _copy(inputs))
        tolerance = spec.tolerance[dtype]
        for what in dict.fromkeys([*want, *got]):
            bound = tolerance.backward if what.startswith("grad ") else tolerance.forward
            both = what in want and what in got
            # A gradient or a state that only one of them has is as wrong as can be.
            error = relative_error(got[what], want[what]) if both else math.inf
            yield CheckResult(spec.name, name, backend, what, error, bound)


def _copy(inputs: Inputs) -> Inputs:
    return {k: _leaf(v, v.dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _as_double(inputs: Inputs) -> Inputs:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _leaf(value, torch.float64 if value.is_floating_point() else value.dtype)
        return value

    return {name: convert(value) for name, value in inputs.items()}


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)


def _run(op: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Outputs, in-place changes and, where asked for, gradients of a random projection."""
    out = op(**inputs)
    outputs = [out] if isinstance(out, Tensor) else [x for x in out if x is not None]
    results = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    leaves = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in leaves:
            results[f"after {name}"] = value.detach()
    if leaves:
        generator = torch.Generator().manual_seed(7)
        total = sum(
            (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
            for x in outputs
            if x.is_floating_point()
        )
        assert isinstance(total, Tensor)
        total.backward()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                results[f"grad {name}"] = leaf.grad
    return results
