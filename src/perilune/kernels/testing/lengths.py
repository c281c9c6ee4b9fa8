"""Lengths from none to far: about every tile and chunk, alone and in every place of a pack."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.testing.compare import compare, holds, identical
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.slicing import num_sequences, of_sequences, results_of
from perilune.kernels.testing.subject import Draw, Subject, against_truth

REFUSED_OR_EMPTY = "refused or empty"


def lengths(subject: Subject) -> Iterator[Case]:
    """One sequence (or that many tokens) of each length, against the truth."""
    for grad in subject.modes:
        yield subject.case(f"no token{', with gradients' * grad}", _nothing, grad)
    sizes = subject.sizes
    for length in (*sizes.lengths, sizes.far) if subject.traits.packing else sizes.rows:
        yield subject.case(f"{length} tokens", _length, length)


def packs(subject: Subject) -> Iterator[Case]:
    """Each length in each position of a pack, against the same sequences alone; then with empty
    sequences before, between and behind them, against the truth."""
    if not subject.traits.packing:
        return
    mixed = subject.sizes.mixed
    for shift in range(len(mixed) if subject.sizes.thorough else 1):
        turned = mixed[shift:] + mixed[:shift]
        yield subject.case(f"lengths {'+'.join(map(str, turned))}", _pack, turned)
    empty = (*(n for length in mixed for n in (0, length)), 0, 0)
    for stateless in (False, True) if subject.traits.state_outputs else (False,):
        case = f"lengths {'+'.join(map(str, empty))}{', no state' * stateless}"
        yield subject.case(case, _empty_among_others, empty, stateless)


def _length(subject: Subject, draw: Draw, length: int) -> Iterator[Finding]:
    grad = length <= subject.sizes.grad_tokens
    return against_truth(subject, draw, draw(length), grad=grad)


def _nothing(subject: Subject, draw: Draw, grad: bool) -> Iterator[Finding]:
    """No token is refused in a clear error, or gives empty outputs and leaves every state alone."""
    try:
        inputs = draw(0)
        got = subject.run(inputs, grad=grad)
    except (UnsupportedError, ValueError):
        yield holds(REFUSED_OR_EMPTY, True)
        return
    for index, axis in subject.traits.token_outputs.items():
        yield holds(f"output {index} empty", got[f"output {index}"].shape[axis] == 0)
    if not subject.traits.token_outputs:
        yield holds(REFUSED_OR_EMPTY, False)
    for name in (each for each in subject.traits.written if inputs[each] is not None):
        yield from identical({name: got[f"after {name}"].cpu()}, {name: inputs[name].detach()})
    for name, index in subject.traits.state_outputs.items():
        after = got[f"output {index}"].cpu()
        yield from identical({name: after}, {name: inputs[name].detach().to(after.dtype)})
    for what in (what for what in got if what.startswith("grad ")):
        yield holds(f"{what} finite", bool(torch.isfinite(got[what]).all()))


def _pack(subject: Subject, draw: Draw, turned: tuple[int, ...]) -> Iterator[Finding]:
    traits = subject.traits
    inputs = draw(*turned)
    together = subject.run(inputs)
    for n in range(num_sequences(traits, inputs)):
        alone = of_sequences(traits, inputs, [n])
        want = results_of(traits, alone, subject.run(alone), [0])
        got = results_of(traits, inputs, together, [n])
        for what, error, bound in compare(got, want, subject.tolerance):
            yield Finding(f"{what} of sequence {n}", error, bound)


def _empty_among_others(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], stateless: bool
) -> Iterator[Finding]:
    inputs = draw(*lengths)
    inputs |= dict.fromkeys(subject.traits.state_outputs) if stateless else {}
    grad = sum(lengths) <= subject.sizes.grad_tokens
    return against_truth(subject, draw, inputs, grad=grad)
