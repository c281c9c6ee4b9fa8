"""Many decode steps against float64: rounding must not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs, load_attr
from perilune.kernels.testing.compare import Results, compare, relative_error
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.run import as_double, run
from perilune.kernels.testing.subject import Draw, Subject

_EPS = torch.finfo(torch.float32).eps
_MANY = 64
"""Rows of a single step: enough elements for a rounding to show its average."""


def drift(subject: Subject) -> Iterator[Case]:
    """Half-precision inputs come with states of their own dtype and, as in service, of fp32."""
    if not subject.traits.in_place or subject.traits.packing:
        return
    steps, slowest = subject.sizes.drift_steps, subject.traits.slowest
    change = subject.traits.regimes.get(slowest, dict)
    tail = f", {slowest.replace('_', ' ')}" if slowest else ""
    yield subject.case(f"{steps} steps{tail}", _steps, steps, change, None)
    if torch.finfo(subject.dtype).eps > _EPS:
        yield subject.case(f"{steps} steps{tail}, fp32 state", _steps, steps, change, torch.float32)
        yield subject.case("one step, rounded once", _one_step, None)
        yield subject.case("one step, fp32 state", _one_step, torch.float32)


def _steps(
    subject: Subject,
    draw: Draw,
    steps: int,
    change: Callable[[Inputs], Inputs],
    dtype: torch.dtype | None,
) -> Iterator[Finding]:
    """Outputs and states at every power of two; each side carries its own state."""
    traits = subject.traits
    first = _with_states(subject, change(draw(2)), dtype)
    weights = {name: x for name, x in first.items() if name not in traits.tokens}
    state = subject.placed({name: first[name] for name in traits.in_place}, grad=False)
    truth = as_double({name: first[name].detach() for name in traits.in_place})
    eps = {f"after {name}": torch.finfo(x.dtype).eps for name, x in state.items()}
    oracle = load_attr(subject.spec.oracle)
    for step in range(1, steps + 1):
        tokens = {name: x for name, x in change(draw(2)).items() if name in traits.tokens}
        inputs = subject.placed(weights | tokens, grad=False)
        got = subject.run_on(inputs | state)
        wide = as_double({name: _plain(x) for name, x in (weights | tokens).items()})
        want = run(oracle, wide | truth, grad=False, always=traits.in_place)
        state, truth = _carried(traits.in_place, got), _carried(traits.in_place, want)
        if step & (step - 1) == 0:
            for what, error, bound in compare(got, want, subject.tolerance):
                stored = eps.get(what, max(eps.values()))
                yield Finding(f"{what} after {step}", error, bound + _walk(step, stored))


def _walk(steps: int, eps: float) -> float:
    """What storing a state adds to its relative error, and to that of what is read from it.

    A number x of fewer bits than fp32 has is off by up to eps |x| / 2 once a step, as likely by any
    part of that: eps / (2 sqrt(3)) on average of squares. Roundings of different steps are
    independent, so squares add up; at worst nothing of them fades:

        sqrt(steps / 3) eps / 2

    A truncation is off by eps / 4 on average, always towards zero, and adds up by itself: its error
    grows with the steps, not with their root.
    """
    return (steps / 3) ** 0.5 * eps / 2 if eps > _EPS else 0.0


def _one_step(subject: Subject, draw: Draw, dtype: torch.dtype | None) -> Iterator[Finding]:
    """States against the truth rounded as they are stored: the one rounding that `_walk` grants.

    An implementation whose fp32 arithmetic is off by e rounds to the neighbouring number with
    probability |e| / ulp, and is then off by an ulp, at most eps |x|: E[d^2] <= e^2 + |e| eps |x|,
    or, with the relative error r that the op has in fp32, sqrt(r^2 + r eps) (Cauchy-Schwarz).
    """
    traits = subject.traits
    inputs = _with_states(subject, draw(_MANY), dtype)
    got = subject.run(inputs)
    wide = as_double({name: _plain(x) for name, x in inputs.items()})
    want = run(load_attr(subject.spec.oracle), wide, grad=False, always=traits.in_place)
    exact = subject.spec.tolerance[torch.float32].forward
    for name, x in _carried(traits.in_place, want).items():
        stored = inputs[name].dtype
        error = relative_error(got[f"after {name}"], x.to(stored))
        bound = (exact * (exact + torch.finfo(stored).eps)) ** 0.5
        yield Finding(f"after {name}", error, bound)


def _with_states(subject: Subject, inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """With states of that dtype; None: as they were drawn."""
    names = subject.traits.in_place if dtype is not None else ()
    return inputs | {name: inputs[name].detach().to(dtype) for name in names}


def _carried(names: tuple[str, ...], results: Results) -> dict[str, Tensor]:
    return {name: results[f"after {name}"] for name in names}


def _plain(x: object) -> object:
    return x.detach() if isinstance(x, Tensor) else x
