"""Two runs are the same bits, a row is what it is alone, and counters add up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.kernels.testing.compare import compare, holds, identical
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.slicing import of_sequences, results_of
from perilune.kernels.testing.subject import Draw, Subject


def determinism(subject: Subject) -> Iterator[Case]:
    for lengths in subject.shapes:
        tail = f", lengths {'+'.join(map(str, lengths))}"
        for grad in subject.modes:
            how = " with gradients" if grad else ""
            yield subject.case(f"twice{how}{tail}", _twice, lengths, grad)
        yield subject.case(f"new values in the same memory{tail}", _reused, lengths)


def batches(subject: Subject) -> Iterator[Case]:
    """A row in a batch against the row alone, bitwise as far as the backend declares it; and what
    a batch adds to counters against what its halves add."""
    if not subject.traits.tokens:
        return
    for rows in subject.sizes.batches:
        yield subject.case(f"a row of {rows}", _row, rows)
        if subject.traits.counters:
            yield subject.case(f"counters of {rows}", _counters, rows)


def _twice(subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool) -> Iterator[Finding]:
    inputs = draw(*lengths)
    yield from identical(subject.run(inputs, grad=grad), subject.run(inputs, grad=grad))


def _reused(subject: Subject, draw: Draw, lengths: tuple[int, ...]) -> Iterator[Finding]:
    """A result remembered by its address would be the old one."""
    old, new = draw(*lengths), draw(*lengths)
    with torch.inference_mode():
        buffers = subject.placed(old, grad=False)
        subject.run_on(buffers)
        # Elsewhere, since the buffers are still there: an address of its own.
        want = subject.run(new)
        for name, value in new.items():
            if isinstance(value, Tensor):
                buffers[name].copy_(value)
    yield from identical(subject.run_on(buffers), want)


def _row(subject: Subject, draw: Draw, rows: int) -> Iterator[Finding]:
    traits = subject.traits
    # Sequences of one and two tokens: a pack has to be cheap at 256 of them.
    lengths = tuple(1 + n % 2 for n in range(rows)) if traits.packing else (rows,)
    inputs = draw(*lengths)
    together = subject.run(inputs)
    exact = rows <= traits.batch_invariant.get(subject.implementation.backend, 0)
    for n in sorted({0, rows // 2, rows - 1}):
        alone = of_sequences(traits, inputs, [n])
        want = results_of(traits, alone, subject.run(alone), [0])
        got = results_of(traits, inputs, together, [n])
        found = identical(got, want) if exact else compare(got, want, subject.tolerance)
        for what, error, bound in found:
            yield Finding(f"{what} of row {n}", error, bound)


def _counters(subject: Subject, draw: Draw, rows: int) -> Iterator[Finding]:
    """Those of the second half go on from where the first half left them."""
    traits, inputs = subject.traits, draw(rows)
    together = subject.run(inputs)
    counted = [name for name in traits.counters if inputs[name] is not None]
    yield holds("counters change", all(f"after {name}" in together for name in counted))
    start = 0
    after = {name: inputs[name] for name in counted}
    for end in (rows // 2, rows):
        part = of_sequences(traits, inputs, range(start, end)) | after
        found = subject.run(part)
        after = {name: found[f"after {name}"].cpu() for name in counted}
        start = end
    want = {f"after {name}": x for name, x in after.items()}
    yield from identical({what: together[what].cpu() for what in want}, want)
