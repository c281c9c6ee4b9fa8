"""States in a pool of slots: a call changes the slots that it was given, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import Results, holds, identical, same_bits
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.slicing import of_sequences, results_of
from perilune.kernels.testing.subject import Draw, Subject


def pool(subject: Subject) -> Iterator[Case]:
    if not subject.traits.slots:
        return
    yield subject.case("other slots stay", _isolated)
    yield subject.case("slots elsewhere", _moved)
    if subject.traits.inert_slot is not None:
        yield subject.case("padding is inert", _inert)


def _isolated(subject: Subject, draw: Draw) -> Iterator[Finding]:
    inputs = draw(*subject.shapes[-1])
    return _others_stay(subject, inputs, subject.run(inputs))


def _moved(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """The same states in other slots give the same outputs and states."""
    traits = subject.traits
    inputs = draw(*subject.shapes[-1])
    slots = inputs[traits.slots]
    size = inputs[traits.in_place[0]].shape[0]
    place = torch.randperm(size, generator=draw.generator)
    moved = {name: torch.empty_like(inputs[name].detach()) for name in traits.in_place}
    for name, x in moved.items():
        x[place] = inputs[name].detach()
    other = inputs | moved | {traits.slots: place[slots].to(slots.dtype)}
    rows = range(len(slots))
    got = results_of(traits, other, subject.run(other), rows)
    yield from identical(got, results_of(traits, inputs, subject.run(inputs), rows))


def _inert(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """Rows of padding, full of NaN, among the others: nothing else notices."""
    traits = subject.traits
    inputs = draw(*subject.shapes[-1])
    total = len(inputs[traits.slots])
    order = [0, *range(total), total - 1]
    padded = of_sequences(traits, inputs, order)
    pads = [0, total + 1]
    padded[traits.slots][pads] = traits.inert_slot
    for name, axis in traits.tokens.items():
        padded[name] = padded[name].detach().index_fill(axis, torch.tensor(pads), torch.nan)
    results = subject.run(padded)
    got = results_of(traits, padded, results, range(1, total + 1))
    yield from identical(got, results_of(traits, inputs, subject.run(inputs), range(total)))
    yield from _others_stay(subject, padded, results)


def _others_stay(subject: Subject, inputs: Inputs, results: Results) -> Iterator[Finding]:
    owned = set(inputs[subject.traits.slots].tolist())
    for name in subject.traits.in_place:
        others = [i for i in range(inputs[name].shape[0]) if i not in owned]
        now, before = results[f"after {name}"].cpu(), inputs[name].detach()
        yield holds(f"other slots of {name}", same_bits(now[others], before[others]))
