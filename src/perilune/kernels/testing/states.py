"""States: none is zero, narrow and one-sided ones, prefill in two pieces and token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perilune.kernels.registry import Inputs, load_attr
from perilune.kernels.testing.compare import Results, compare
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.run import run
from perilune.kernels.testing.slicing import of_tokens
from perilune.kernels.testing.subject import Draw, Subject, against_truth


def states(subject: Subject) -> Iterator[Case]:
    """Only of ops that take a state and return it."""
    if not subject.traits.state_outputs:
        return
    yield subject.case("no state is a state of zeros", _none_is_zero)
    yield subject.case("bf16 state", _narrow)
    yield subject.case("one-sided state", _one_sided)
    for seed in subject.seeds[-2:] if subject.sizes.thorough else subject.seeds[-1:]:
        yield subject.case("two pieces", two_pieces, sum(subject.sizes.mixed), seed=seed)
    yield subject.case("one token, then another", two_pieces, 2)
    if subject.traits.one_token is not None:
        yield subject.case("token by token", _token_by_token)


def _none_is_zero(subject: Subject, draw: Draw) -> Iterator[Finding]:
    inputs = draw(*subject.sizes.mixed)
    names = subject.traits.state_outputs
    none = subject.run(inputs | dict.fromkeys(names))
    zeros = subject.run(inputs | {name: torch.zeros_like(inputs[name]) for name in names})
    return compare(none, zeros, subject.tolerance)


def _narrow(subject: Subject, draw: Draw) -> Iterator[Finding]:
    inputs = draw(*subject.sizes.mixed)
    narrow = {name: inputs[name].detach().bfloat16() for name in subject.traits.state_outputs}
    return against_truth(subject, draw, inputs | narrow, grad=False)


def _one_sided(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """A state unlike its transpose: it tells [K, V] from [V, K]."""
    inputs = draw(*subject.sizes.mixed)
    upper = {name: 10 * inputs[name].detach().triu(1) for name in subject.traits.state_outputs}
    return against_truth(subject, draw, inputs | upper, grad=False)


def two_pieces(
    subject: Subject, draw: Draw, length: int, cut: int | None = None
) -> Iterator[Finding]:
    """The whole against its first `cut` tokens and the rest, states included."""
    inputs = draw(length)
    cut = draw.integer(1, length - 1) if cut is None else cut
    whole = subject.run(inputs)
    first = subject.run(of_tokens(subject.traits, inputs, 0, cut))
    rest = of_tokens(subject.traits, inputs, cut, length)
    second = subject.run(rest | _states_after(subject, first))
    for what, error, bound in compare(_joined(subject, [first, second]), whole, subject.tolerance):
        yield Finding(f"{what}, cut at {cut}", error, 2 * bound)


def _token_by_token(subject: Subject, draw: Draw) -> Iterator[Finding]:
    traits = subject.traits
    assert traits.one_token is not None
    length = subject.sizes.mixed[0]
    inputs = draw(length)
    whole = subject.run(inputs)
    decode, in_place = load_attr(traits.one_token.run), traits.one_token.in_place
    first = {name: inputs[name] for name in traits.state_outputs}
    state = subject.placed(first, grad=False)
    outputs = []
    for t in range(length):
        token = subject.placed(of_tokens(traits, inputs, t, t + 1), grad=False)
        step = traits.one_token.convert(token | state)
        results = run(decode, step, grad=False, always=in_place)
        after = [results[f"after {name}"] for name in in_place]
        state = dict(zip(traits.state_outputs, after, strict=True))
        outputs.append({"output 0": results["output 0"]})
    outputs[-1] |= {f"output {i}": state[name] for name, i in traits.state_outputs.items()}
    for what, error, bound in compare(_joined(subject, outputs), whole, subject.tolerance):
        yield Finding(what, error, 2 * bound)


def _states_after(subject: Subject, results: Results) -> Inputs:
    return {name: results[f"output {i}"] for name, i in subject.traits.state_outputs.items()}


def _joined(subject: Subject, pieces: list[Results]) -> Results:
    """Outputs one after another, and the state after the last piece."""
    joined = {
        f"output {i}": torch.cat([piece[f"output {i}"] for piece in pieces], dim=axis)
        for i, axis in subject.traits.token_outputs.items()
    }
    last = pieces[-1]
    return joined | {
        f"output {i}": last[f"output {i}"] for i in subject.traits.state_outputs.values()
    }
