"""Conformance: an implementation against the truth, in outputs, states and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import UnsupportedError
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs, OpSpec, Tolerance, load_attr

REFERENCE = "reference"


class CheckResult(NamedTuple):
    op: str
    case: str
    backend: str
    """`reference` or a device type; with the dtype, where that is not fp32."""
    what: str
    """Which output, mutated input or gradient."""
    error: float
    """||x - truth|| / ||truth||, in float64."""
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


class Implementation(NamedTuple):
    backend: str
    path: str
    """`module:attr`."""
    device: str
    tolerance: Mapping[torch.dtype, Tolerance]
    """Of each dtype that it serves."""


def is_here(device: str) -> bool:
    """Whether this machine has a device of that type."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return device == "cpu" or (found is not None and found.type == device)


def implementations(spec: OpSpec, backend: str | None = None) -> list[Implementation]:
    """The reference and every declared backend that can run here, or only the one asked for.

    A device type without a backend of its own runs the reference there, as in `resolve`.

    Raises:
        UnsupportedError: a device is asked for that is not here.
    """
    reference = Implementation(REFERENCE, spec.reference, "cpu", spec.tolerance)
    if backend == REFERENCE:
        return [reference]
    if backend is not None:
        if not is_here(backend):
            raise UnsupportedError(f"no {backend} device here, so its kernels cannot be checked")
        return [_on(spec, backend)]
    return [reference, *(_on(spec, device) for device in spec.backends if is_here(device))]


def _on(spec: OpSpec, device: str) -> Implementation:
    path = spec.backends.get(device, spec.reference)
    return Implementation(device, path, device, spec.backend_tolerance.get(device, spec.tolerance))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN and infinities never pass."""
    got, want = got.double().cpu(), want.double().cpu()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.norm())
    gap = float((got - want).norm())
    return gap / scale if scale else gap


def check(spec: OpSpec, *, seed: int = 0, backend: str | None = None) -> Iterator[CheckResult]:
    """Every case of `implementations(spec, backend)` in each dtype served, against the oracle.

    The oracle runs in float64 on the same inputs. An implementation runs twice: with gradients,
    and as in inference, where it may take another path.

    Raises:
        UnsupportedError: a device is asked for that is not here.
    """
    chosen = implementations(spec, backend)
    for dtype in dict.fromkeys(dtype for each in chosen for dtype in each.tolerance):
        serving = [each for each in chosen if dtype in each.tolerance]
        for index, (name, make) in enumerate(spec.cases.items()):
            generator = torch.Generator().manual_seed(seed * 1000 + index)
            inputs = make(generator, dtype)
            want = _run(load_attr(spec.oracle), _as_double(inputs))
            for each in serving:
                got = _run_both_ways(load_attr(each.path), inputs, each.device)
                for what, error, bound in _compare(got, want, each.tolerance[dtype]):
                    yield CheckResult(
                        spec.name, name, _label(each.backend, dtype), what, error, bound
                    )


def _label(backend: str, dtype: torch.dtype) -> str:
    plain = dtype == torch.float32
    return backend if plain else f"{backend} {str(dtype).removeprefix('torch.')}"


def _compare(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: Tolerance
) -> Iterator[tuple[str, float, float]]:
    forward = {what: x for what, x in want.items() if not what.startswith("grad ")}
    want = want | {f"inference {what}": x for what, x in forward.items()}
    for what in dict.fromkeys([*want, *got]):
        bound = tolerance.backward if what.startswith("grad ") else tolerance.forward
        both = what in want and what in got
        # A gradient or a state that only one of them has is as wrong as can be.
        yield what, relative_error(got[what], want[what]) if both else math.inf, bound


def _run_both_ways(op: Callable[..., Any], inputs: Inputs, device: str) -> dict[str, Tensor]:
    results = _run(op, {name: _placed(value, device) for name, value in inputs.items()})
    with torch.inference_mode():
        plain = {name: _placed(value, device, leaf=False) for name, value in inputs.items()}
        inferred = _run(op, plain)
    return results | {f"inference {what}": x for what, x in inferred.items()}


def _placed(value: Any, device: str, *, leaf: bool = True) -> Any:
    """A copy of an op's argument on `device`."""
    if isinstance(value, Tensor):
        copied = value.detach().to(device, copy=True)
        return copied.requires_grad_(leaf and value.requires_grad)
    if isinstance(value, Packing) and value.segment_BL is not None:
        return replace(value, segment_BL=value.segment_BL.to(device))
    return value


def _as_double(inputs: Inputs) -> Inputs:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(torch.float64, copy=True).requires_grad_(value.requires_grad)
        return value

    return {name: convert(value) for name, value in inputs.items()}


def _run(op: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Outputs, in-place changes and, where asked for, gradients of a random projection."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    before = {name: value.detach().clone() for name, value in tensors.items()}
    out = op(**inputs)
    outputs = [out] if isinstance(out, Tensor) else [x for x in out if x is not None]
    results = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    for name, value in tensors.items():
        if not torch.equal(value, before[name]):
            results[f"after {name}"] = value.detach()
    leaves = {name: value for name, value in tensors.items() if value.requires_grad}
    if leaves:
        _project(outputs).backward()
        grads = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
        results |= {what: grad for what, grad in grads.items() if grad is not None}
    return results


def _project(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    terms = [
        (x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
        for x in outputs
        if x.is_floating_point()
    ]
    return torch.stack(terms).sum()
