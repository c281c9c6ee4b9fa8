"""Many decode steps against float64: rounding must not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from perilune.kernels.registry import Inputs, load_attr
from perilune.kernels.testing.compare import Results, compare
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.run import as_double, run
from perilune.kernels.testing.subject import Draw, Subject


def drift(subject: Subject) -> Iterator[Case]:
    if subject.traits.in_place and not subject.traits.packing:
        steps, slowest = subject.sizes.drift_steps, subject.traits.slowest
        change = subject.traits.regimes.get(slowest, dict)
        tail = f", {slowest.replace('_', ' ')}" if slowest else ""
        yield subject.case(f"{steps} steps{tail}", _steps, steps, change)


def _steps(
    subject: Subject, draw: Draw, steps: int, change: Callable[[Inputs], Inputs]
) -> Iterator[Finding]:
    """Outputs and states at every power of two; each side carries its own state."""
    traits = subject.traits
    first = change(draw(2))
    weights = {name: x for name, x in first.items() if name not in traits.tokens}
    state = subject.placed({name: first[name] for name in traits.in_place}, grad=False)
    truth = as_double({name: first[name].detach() for name in traits.in_place})
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
                yield Finding(f"{what} after {step}", error, bound)


def _carried(names: tuple[str, ...], results: Results) -> dict[str, Tensor]:
    return {name: results[f"after {name}"] for name in names}


def _plain(x: object) -> object:
    return x.detach() if isinstance(x, Tensor) else x
