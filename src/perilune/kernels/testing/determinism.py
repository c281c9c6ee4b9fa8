"""Two runs are the same bits, in any thread, a row is what it is alone, and counters add up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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
        if subject.sizes.thorough:
            yield subject.case(f"in a thread of its own{tail}", _in_a_thread, lengths)
    if subject.implementation.backend in subject.traits.gradients_vary and subject.trains:
        long = subject.sizes.lengths[-1:]
        yield subject.case(f"twice with gradients, length {long[0]}", _twice, long, True)
        yield subject.case(f"twice as torch is asked to, length {long[0]}", _asked_twice, long)


def batches(subject: Subject) -> Iterator[Case]:
    """A row in a batch against the row alone, bitwise as far as the backend declares it; and what
    a batch adds to counters against what its halves add."""
    if not subject.traits.tokens:
        return
    sizes = subject.sizes.batches
    claimed = subject.traits.batch_invariant.get(subject.implementation.backend, 0)
    if subject.sizes.full_width and claimed > max(sizes):
        sizes = (*sizes, claimed)
    for rows in sizes:
        yield subject.case(f"a row of {rows}", _row, rows)
        if subject.traits.counters:
            yield subject.case(f"counters of {rows}", _counters, rows)


def _twice(subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool) -> Iterator[Finding]:
    inputs = draw(*lengths)
    first, second = (subject.run(inputs, grad=grad) for _ in range(2))
    vary = subject.traits.gradients_vary.get(subject.implementation.backend)
    if not grad or vary is None or not vary(inputs):
        yield from identical(first, second)
        return
    outputs = [what for what in first if not what.startswith("grad ")]
    yield from identical(*({what: found[what] for what in outputs} for found in (first, second)))
    yield from compare(first, second, subject.tolerance)


def _in_a_thread(subject: Subject, draw: Draw, lengths: tuple[int, ...]) -> Iterator[Finding]:
    """The same bits in a thread in which nothing ran: no context of a device is bound to it."""
    inputs = draw(*lengths)
    want = subject.run(inputs)
    placed = subject.placed(inputs, grad=False)
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(subject.run_on, placed).result()
    yield from identical(got, want)


def _asked_twice(subject: Subject, draw: Draw, lengths: tuple[int, ...]) -> Iterator[Finding]:
    """Every bit, gradients too, where only deterministic algorithms are allowed."""
    inputs = draw(*lengths)
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS is not asked: it would want an environment variable.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (subject.run(inputs, grad=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    yield from identical(first, second)


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
