"""Hostile memory: what an op must not read is NaN or huge, what it must not write is watched."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import holds, identical
from perilune.kernels.testing.memory import NewMemory, banded, bands_hold, each_tensor
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.slicing import num_sequences, results_of
from perilune.kernels.testing.subject import Draw, Subject


def poison(subject: Subject) -> Iterator[Case]:
    for lengths in subject.shapes:
        tail = f", lengths {'+'.join(map(str, lengths))}"
        for grad in subject.modes:
            how = " with gradients" if grad else ""
            yield subject.case(f"new memory is NaN{how}{tail}", new_memory, lengths, grad)
            for value in (torch.nan, 1e30) if subject.sizes.thorough else (torch.nan,):
                case = f"{value:g} around every input{how}{tail}"
                yield subject.case(case, surrounded, lengths, value, grad)
        if subject.traits.tokens:
            total = len(lengths) if subject.traits.packing else lengths[0]
            for sick in sorted({0, total // 2, total - 1}):
                yield subject.case(f"NaN in sequence {sick}{tail}", _neighbour, lengths, sick)


def new_memory(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool
) -> Iterator[Finding]:
    """The same bits when outputs and work buffers start as NaN, and nothing beside them changes."""
    inputs = draw(*lengths)
    plain = subject.run(inputs, grad=grad)
    memory = NewMemory(poisoned=True)
    poisoned = subject.run(inputs, grad=grad, around=memory)
    yield from identical(poisoned, plain)
    yield holds("nothing beside new memory changed", not memory.overrun())


def surrounded(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], value: float, grad: bool
) -> Iterator[Finding]:
    """The same bits whatever lies before and behind each input, and that stays as it was."""
    inputs = draw(*lengths)
    plain = subject.run(inputs, grad=grad)
    kept: list[tuple[str, Tensor, Tensor]] = []

    def surround(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        buffer, inner = banded(x.detach(), value)
        inner.copy_(x.detach())
        kept.append((name, buffer, inner))
        return inner.detach().requires_grad_(x.requires_grad)

    around = each_tensor(subject.placed(inputs, grad=grad), surround)
    yield from identical(subject.run_on(around, grad=grad), plain)
    for name, buffer, inner in kept:
        yield holds(f"bands of {name}", bands_hold(buffer, inner, value))


def _neighbour(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], sick: int
) -> Iterator[Finding]:
    """NaN in the tokens and the state of one sequence reaches no other one."""
    traits = subject.traits
    inputs = draw(*lengths)
    well = [n for n in range(num_sequences(traits, inputs)) if n != sick]
    broken = _with_nan(subject, inputs, sick)
    got = results_of(traits, inputs, subject.run(broken), well)
    want = results_of(traits, inputs, subject.run(inputs), well)
    for what, error, bound in identical(got, want):
        yield Finding(f"{what} beside sequence {sick}", error, bound)


def _with_nan(subject: Subject, inputs: Inputs, sick: int) -> Inputs:
    traits = subject.traits
    start, end = sick, sick + 1
    if traits.packing:
        start, end = inputs[traits.packing].cu_seqlens[sick : sick + 2]
    places = {name: (axis, start, end) for name, axis in traits.tokens.items()}
    places |= {name: (axis, sick, sick + 1) for name, axis in traits.sequences.items()}
    if traits.slots:
        slot = int(inputs[traits.slots][sick])
        places |= dict.fromkeys(traits.in_place, (0, slot, slot + 1))

    def broken(name: str, x: Tensor) -> Tensor:
        if name not in places or not x.is_floating_point():
            return x
        axis, first, last = places[name]
        x = x.detach().clone()
        x.narrow(axis, first, last - first).fill_(torch.nan)
        return x

    return each_tensor(inputs, broken)
