"""One implementation of one op, in one dtype, at one width: what a family of checks is given."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from perilune.kernels.registry import Inputs, OpSpec, Tolerance, load_attr
from perilune.kernels.testing.compare import Results, compare
from perilune.kernels.testing.conditioning import conditioned
from perilune.kernels.testing.conformance import with_inference
from perilune.kernels.testing.implementation import REFERENCE, Implementation
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.run import as_double, placed, run
from perilune.kernels.testing.tiers import Sizes
from perilune.kernels.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Subject:
    spec: OpSpec
    traits: Traits
    implementation: Implementation
    dtype: torch.dtype
    sizes: Sizes
    width: int
    seeds: tuple[int, ...]
    """The fixed ones and, last, the one drawn for this run."""
    truths: dict[Any, Results] = field(default_factory=dict)
    """Shared by all who have the same oracle and draw the same inputs: a truth is a slow loop."""

    @property
    def op(self) -> Callable[..., Any]:
        return self.implementation.load()

    @property
    def tolerance(self) -> Tolerance:
        return self.implementation.tolerance[self.dtype]

    @property
    def backend(self) -> str:
        """Its device type, or `reference` wherever that runs."""
        is_reference = self.implementation.path == self.spec.reference
        return REFERENCE if is_reference else self.implementation.backend

    @property
    def device(self) -> str:
        return self.implementation.device

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Lengths to draw: a pack or, without a packing, numbers of tokens."""
        alone = tuple((count,) for count in self.sizes.rows_drawn)
        return (self.sizes.mixed,) if self.traits.packing else alone

    @cached_property
    def modes(self) -> tuple[bool, ...]:
        """As in inference and, where an input asks for one, with gradients; where time is short,
        they are left to the families that compare with the truth."""
        return (False, True) if self.trains and self.sizes.thorough else (False,)

    @cached_property
    def trains(self) -> bool:
        """Whether an input asks for a gradient, and the implementation gives any."""
        if self.implementation.forward_only:
            return False
        probe = self.traits.make(torch.Generator(), self.dtype, self.shapes[0], self.width)
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in probe.values())

    def case(
        self,
        name: str,
        findings: Callable[..., Iterator[Finding]],
        *args: Any,
        seed: int | None = None,
    ) -> Case:
        """`findings(subject, draw, *args)`, where `draw` makes this case's inputs by lengths."""
        seed = self.seeds[-1] if seed is None else seed
        return Case(name, partial(findings, self, Draw(self, name, seed), *args), seed)

    def run(
        self,
        inputs: Inputs,
        *,
        grad: bool = False,
        around: AbstractContextManager[Any] | None = None,
    ) -> Results:
        """The implementation on copies of `inputs`."""
        return self.run_on(self.placed(inputs, grad=grad), grad=grad, around=around)

    def placed(self, inputs: Inputs, *, grad: bool) -> Inputs:
        """Copies of `inputs` where the implementation runs."""
        guarded = self.implementation.interpreted
        return placed(inputs, self.device, grad=grad, guarded=guarded)

    def run_on(
        self,
        inputs: Inputs,
        *,
        grad: bool = False,
        around: AbstractContextManager[Any] | None = None,
        op: Callable[..., Any] | None = None,
    ) -> Results:
        """The implementation (or `op` in its place) on `inputs` themselves, however they lie."""
        return run(
            op or self.op,
            inputs,
            grad=grad,
            always=self.traits.written,
            guarded=self.implementation.interpreted,
            around=around,
        )


class Draw:
    """The random inputs of one case, and what they should give."""

    def __init__(self, subject: Subject, name: str, seed: int) -> None:
        self._subject = subject
        made = (subject.traits.make, subject.width, subject.dtype, subject.sizes)
        self._key = (name, seed, *made)
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))

    def __call__(self, *lengths: int) -> Inputs:
        subject = self._subject
        return subject.traits.make(self.generator, subject.dtype, lengths, subject.width)

    def of_width(self, width: int) -> Draw:
        """The same case with inputs of another width."""
        return Draw(replace(self._subject, width=width), *self._key[:2])

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def truth(self, inputs: Inputs, *, grad: bool) -> Results:
        """In float64: by the oracle or, of many tokens, by the reference, which it holds up."""
        subject = self._subject
        path, many = self._oracle(inputs)
        key = (path, *self._key, grad)
        if key not in subject.truths:
            wide = as_double(inputs)
            wide = placed(wide, subject.device, grad=grad) if many else wide
            subject.truths[key] = run(
                load_attr(path), wide, grad=grad, always=subject.traits.written
            )
        return subject.truths[key]

    def conditioned(
        self, findings: Iterable[Finding], inputs: Inputs, want: Results, *, grad: bool
    ) -> Iterator[Finding]:
        """`conditioning.conditioned` by the same truth."""
        subject = self._subject
        path, many = self._oracle(inputs)
        wide = placed(inputs, subject.device, grad=grad) if many else inputs
        return conditioned(findings, subject.dtype, load_attr(path), wide, want, grad=grad)

    def _oracle(self, inputs: Inputs) -> tuple[str, bool]:
        """What says the truth, and whether it runs where the implementation does."""
        sizes, traits = self._subject.sizes, self._subject.traits
        enough = sizes.oracle_tokens if traits.packing else sizes.oracle_rows
        many = num_tokens(traits, inputs) > enough
        return self._subject.spec.reference if many else self._subject.spec.oracle, many


def num_tokens(traits: Traits, inputs: Inputs) -> int:
    return max((inputs[name].shape[axis] for name, axis in traits.tokens.items()), default=0)


def against_truth(subject: Subject, draw: Draw, inputs: Inputs, *, grad: bool) -> Iterator[Finding]:
    """Outputs and states as in inference and, with `grad`, a second time with gradients."""
    grad = grad and subject.trains
    truth, got = draw.truth(inputs, grad=grad), {}
    if grad:
        got = subject.run(inputs, grad=True)
        want = with_inference(truth)
    else:
        want = {f"inference {what}": x for what, x in truth.items()}
    inferred = subject.run(inputs)
    got |= {f"inference {what}": x for what, x in inferred.items()}
    found = compare(got, want, subject.tolerance)
    return draw.conditioned(found, inputs, truth, grad=grad)
