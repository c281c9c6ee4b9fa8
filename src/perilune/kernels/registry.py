"""Every op, declared once: its signature, its truth, its backends, its cases and tolerances.

The model calls an op through `resolve(name)`. A backend is chosen by device once, the choice is
logged with its reason, and an unsupported one raises: nothing falls back silently. `choose`, or the
environment variable PERILUNE_KERNELS, puts another package's backend in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from perilune.core.env import kernel_choices
from perilune.core.errors import UnsupportedError
from perilune.kernels.plugins import find, load_run
from perilune.kernels.serving import Choice, serving

log = logging.getLogger(__name__)

OPS: dict[str, str] = {
    "linear": "perilune.kernels.linear:SPEC",
    "scores": "perilune.kernels.linear:SCORES",
    "kda_chunk": "perilune.kernels.kda:CHUNK",
    "kda_step": "perilune.kernels.kda_step:SPEC",
    "causal_conv": "perilune.kernels.causal_conv:CONV",
    "rms_norm": "perilune.kernels.norm:RMS_NORM",
    "gated_rms_norm": "perilune.kernels.norm:GATED_RMS_NORM",
    "attn_res": "perilune.kernels.attn_res:SPEC",
    "router": "perilune.kernels.router:ROUTER",
    "permute": "perilune.kernels.router:PERMUTE",
    "experts": "perilune.kernels.experts:SPEC",
    "experts_mxfp4": "perilune.kernels.experts:MXFP4",
    "mla_prefill": "perilune.kernels.mla:PREFILL",
    "mla_decode": "perilune.kernels.mla:DECODE",
    "situ": "perilune.kernels.situ:SPEC",
    "sigmoid_gate": "perilune.kernels.gate:SPEC",
}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed ||x - truth|| / ||truth|| of outputs and states, and of gradients."""

    forward: float
    backward: float


Inputs = dict[str, Any]
"""Keyword arguments of an op; tensors that require a gradient are checked backward too."""


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    name: str
    signature: str
    """One line: tensors with their shape suffixes."""
    reference: str
    """`module:attr` of what backends stand in for: plain torch, fp32 inside, differentiable."""
    oracle: str
    """`module:attr` of the truth: the definition, step by step, and never a call of the reference.
    Conformance runs it in float64."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Device type -> `module:attr`; a device without an entry runs the reference."""
    cases: Mapping[str, Callable[[torch.Generator, torch.dtype], Inputs]]
    """Named input makers for conformance: odd sizes and extremes included."""
    tolerance: Mapping[torch.dtype, Tolerance]
    """Of each dtype that the reference serves, and every backend not named below."""
    backend_tolerance: Mapping[str, Mapping[torch.dtype, Tolerance]] = field(default_factory=dict)
    """Device type -> what its backend serves instead."""
    traits: str | None = None
    """`module:attr` of what the property checks need to know (`kernels.traits.Traits`)."""


def load_attr(path: str) -> Any:
    """The object that `module:attr` names."""
    module, _, attr = path.partition(":")
    return getattr(import_module(module), attr)


def spec(name: str) -> OpSpec:
    """The declaration of op `name`.

    Raises:
        UnsupportedError: there is no such op.
    """
    if name not in OPS:
        raise UnsupportedError(f"unknown op {name!r}; known: {', '.join(OPS)}")
    return load_attr(OPS[name])


_ops: WeakSet[Op] = WeakSet()
_choices: dict[str, str | None] = {}


def choose(op: str, backend: str | None) -> None:
    """From here on plug-in `backend` serves `op` in this process; None: perilune's own again.

    It comes before PERILUNE_KERNELS. That the plug-in passed its check is asked when the op is
    next called.

    Raises:
        UnsupportedError: there is no such op, or no such plug-in of it.
    """
    spec(op)
    if backend is not None:
        find(op, backend)
    _choices[op] = backend
    for each in list(_ops):
        if each.name == op:
            each.forget()


def choice(op: str) -> Choice | None:
    """The plug-in that `choose` or PERILUNE_KERNELS names for `op`.

    Raises:
        ConfigError: PERILUNE_KERNELS is not of its form.
        UnsupportedError: it names an op that does not exist.
    """
    named = kernel_choices()
    for unknown in (name for name in named if name not in OPS):
        raise UnsupportedError(
            f"PERILUNE_KERNELS names an unknown op {unknown!r}; known: {', '.join(OPS)}"
        )
    backend, by = named.get(op), "PERILUNE_KERNELS"
    if op in _choices:
        backend, by = _choices[op], "choose()"
    return None if backend is None else Choice(backend, by)


class Op:
    """A callable op; picks its implementation by the device of its first tensor, once a device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._chosen: dict[str, Callable[..., Any]] = {}
        _ops.add(self)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = x.device.type
        run = self._chosen.get(kind)
        if run is None:
            run = self._choose(kind)
        return run(x, *args, **kwargs)

    def _choose(self, kind: str) -> Callable[..., Any]:
        path, why, plugin = serving(spec(self.name), kind, choice(self.name))
        log.info("op %s on %s: %s (%s)", self.name, kind, path, why)
        self._chosen[kind] = load_attr(path) if plugin is None else load_run(plugin)
        return self._chosen[kind]

    def forget(self) -> None:
        """Chooses anew at the next call."""
        self._chosen.clear()


def resolve(name: str) -> Op:
    """A handle on op `name`, to be called like a function."""
    if name not in OPS:
        raise UnsupportedError(f"unknown op {name!r}; known: {', '.join(OPS)}")
    _resolved.add(name)
    return Op(name)


_resolved: set[str] = set()


def resolved() -> list[str]:
    """The ops that somebody in this process has a handle on, in the order of `OPS`."""
    return [name for name in OPS if name in _resolved]


class Call(NamedTuple):
    """One call of an op."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls that anybody in this process makes meanwhile, in their order, but for those that an
    op makes of another one."""
    calls: list[Call] = []
    call_op = Op.__call__
    inside = 0

    def record(op: Op, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if not inside:
            calls.append(Call(op.name, args, kwargs))
        inside += 1
        try:
            return call_op(op, *args, **kwargs)
        finally:
            inside -= 1

    Op.__call__ = record
    try:
        yield calls
    finally:
        Op.__call__ = call_op


@contextmanager
def replaced(backends: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Serves those ops by the given functions, on every device, in this process."""
    replaced_ops = [op for op in list(_ops) if op.name in backends]
    before = [dict(op._chosen) for op in replaced_ops]
    for op in replaced_ops:
        op._chosen = dict.fromkeys(("cpu", "cuda"), backends[op.name])
    try:
        yield
    finally:
        for op, chosen in zip(replaced_ops, before, strict=True):
            op._chosen = chosen
