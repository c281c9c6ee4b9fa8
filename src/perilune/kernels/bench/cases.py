"""What is declared about an op's speed: sizes, least work, peers.

A folder of an op holds `bench_cases.py` with `BENCHES`, from the op's name to its `Bench`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import UnsupportedError
from perilune.kernels.registry import OPS, Inputs, load_attr

Make = Callable[[torch.Generator, torch.dtype], Inputs]
"""Fresh inputs on the generator's device, of the same shapes each time."""


class Work(NamedTuple):
    """The least that one call has to do, whatever the algorithm."""

    bytes: int
    """Read and written once each, at the widths of the inputs."""
    flops: int


class Bound(NamedTuple):
    """A peer, ready to be called on one copy of the inputs."""

    call: Callable[[], Any]
    outputs: Callable[[Any], list[Tensor]]
    """What `call` returned, as the op's own outputs: same order, same layout."""
    gradients: Callable[[Any], Mapping[str, Tensor]] | None = None
    """The same of its gradients, by the names of the op's inputs."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    distribution: str
    """Its name in package metadata, for the version."""
    module: str
    """Imported only when it is measured, and only where it is installed."""
    bind: str
    """`module:attr` of a function `(inputs, backward) -> Bound`."""
    prepare: str | None = None
    """`module:attr` of a function `(inputs) -> Inputs`: what it makes, once, of what all copies of
    the inputs share, for `bind` to find among them. Only for cases that share something."""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A part that can be computed alone, for sizes at which the reference would not fit."""

    inputs: Callable[[Inputs], Inputs]
    results: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    said: str = ""
    """In the remarks of a row, where not all of the op's cases are compared so."""


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Make
    shared: Make | None = None
    """Inputs that all copies have in common: the weights of a layer too large to have it twice.
    The others differ, so that each copy's call reads another part."""
    dtype: torch.dtype = torch.float32
    """Of activations and weights."""
    device: str = "cpu"
    """Type of the device that the size is meant for."""
    backward: bool = False
    """Forward and backward in the timed call, gradients of every floating-point input."""
    graph: bool = False
    """Shorter than its launch: timed inside a CUDA graph, with the eager time beside."""
    peers: tuple[Peer, ...] = ()
    excerpt: Excerpt | None = None
    """In place of the op's."""

    def inputs(self, generator: torch.Generator) -> Inputs:
        """All that a call takes, in the case's dtype."""
        shared = {} if self.shared is None else self.shared(generator, self.dtype)
        return self.make(generator, self.dtype) | shared


@dataclass(frozen=True, kw_only=True)
class Bench:
    inside: str
    """What is part of the timed call."""
    work: Callable[[Inputs, bool], Work]
    """`(inputs, backward)`: a function of shapes, and of the experts that are touched."""
    cases: Mapping[str, Case]
    excerpt: Excerpt | None = None
    """None: the truth is computed for the whole call."""


def bench(op: str) -> Bench:
    """The declaration of op `op`.

    Raises:
        UnsupportedError: there is no such op, or it declares no benchmark.
    """
    if op not in OPS:
        raise UnsupportedError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    package = OPS[op].partition(":")[0]
    if importlib.util.find_spec(f"{package}.bench_cases") is None:
        raise UnsupportedError(f"op {op!r} declares no benchmark")
    benches = load_attr(f"{package}.bench_cases:BENCHES")
    if op not in benches:
        raise UnsupportedError(f"op {op!r} declares no benchmark")
    return benches[op]


def drawn(
    generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> Tensor:
    """N(0, scale) on the generator's device."""
    x = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    return x.mul_(scale) if scale != 1.0 else x


def num_bytes(*tensors: Tensor | None) -> int:
    """Together, in memory."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)
