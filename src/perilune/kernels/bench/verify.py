"""Whether what is timed computes the right thing, there and then.

Run on the very callables and memory that are timed, before and after: new values stand in the same
buffers (pointers and version counters kept), every call of a round is made, and what the last one
returned is read at once, without waiting for anybody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Excerpt
from perilune.kernels.bench.contender import Contender
from perilune.kernels.bench.errors import DishonestError
from perilune.kernels.bench.inputs import Copies, clone, differentiable, tensors, thunks
from perilune.kernels.registry import Inputs, Tolerance

Results = dict[str, Tensor]
GRADIENT = "grad "
"""How the name of a result begins that is the gradient of an input."""


class Errors(NamedTuple):
    """The largest relative ones; None where nothing was compared."""

    outputs: float | None
    """Of outputs and states."""
    gradients: float | None

    @classmethod
    def of(cls, errors: Mapping[str, float]) -> Errors:
        grads = [x for name, x in errors.items() if name.startswith(GRADIENT)]
        others = [x for name, x in errors.items() if not name.startswith(GRADIENT)]
        return cls(max(others, default=None), max(grads, default=None))


@dataclass(frozen=True, kw_only=True)
class Truth:
    reference: Callable[..., Any]
    tolerance: Tolerance
    mutated: frozenset[str]
    """Inputs that the op overwrites on purpose."""
    backward: bool
    excerpt: Excerpt | None


def mutated_names(signature: str) -> frozenset[str]:
    """The arguments that carry a `!` in the signature of an op."""
    return frozenset(re.findall(r"(\w+)!", signature))


def verify(contender: Contender, copies: Copies, truth: Truth, what: str) -> Errors:
    """Of the last call of a round.

    Raises:
        DishonestError: values are wrong or arrive late, or an input was changed.
    """
    copies.refresh()
    inputs = copies.copies[-1]
    before = clone(_part_of_inputs(inputs, truth))
    out = contender.round()
    live = _part_of_results(_results(out, inputs, truth, what), truth)
    at_once = {name: x.detach().clone() for name, x in live.items()}
    _require_unchanged(before, _part_of_inputs(inputs, truth), truth, what)
    want = true_results(before, truth)
    for name, x in live.items():
        if not _same_bits(x, at_once[name]):
            raise DishonestError(f"{what}: {name} was written after the call had returned")
    errors = {name: relative_error(at_once.get(name), x) for name, x in want.items()}
    for name, error in errors.items():
        bound = truth.tolerance.backward if name.startswith(GRADIENT) else truth.tolerance.forward
        if not error <= bound:
            raise DishonestError(
                f"{what}: {name} is off by {error:.1e} (bound {bound:.0e}) on new values in the"
                " memory that is timed"
            )
    return Errors.of(errors)


def true_results(inputs: Inputs, truth: Truth) -> Results:
    """What the reference makes of a copy of `inputs`."""
    own = clone(inputs)
    (call,) = thunks(truth.reference, [own], truth.backward)
    if truth.backward:
        return _results(call(), own, truth, "reference")
    with torch.inference_mode():
        return _results(call(), own, truth, "reference")


def relative_error(got: Tensor | None, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64, on their device; infinite for NaN or another shape."""
    if got is None or got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.norm())
    gap = float((got - want).norm())
    return gap / scale if scale else gap


def _results(out: Any, inputs: Inputs, truth: Truth, what: str) -> Results:
    """Named as in conformance: `output 0`, `after state`, `grad x`."""
    listed = [out] if isinstance(out, Tensor) else [x for x in out if x is not None]
    for x in listed:
        # A subclass may stand for work that is done when somebody looks at it.
        if type(x) is not Tensor:
            raise DishonestError(f"{what}: returned a {type(x).__name__}, not a plain tensor")
    leaves = [name for name, x in tensors(inputs).items() if x.requires_grad]
    num_outputs = len(listed)
    results: Results = {}
    if truth.backward:
        outputs = differentiable(listed)
        num_outputs = len(outputs)
        grads = out[num_outputs:]
        named = zip(leaves, grads, strict=True)
        results = {f"{GRADIENT}{name}": grad for name, grad in named if grad is not None}
    results |= {f"output {i}": x for i, x in enumerate(listed[:num_outputs])}
    results |= {f"after {name}": x for name, x in tensors(inputs).items() if name in truth.mutated}
    return results


def _part_of_inputs(inputs: Inputs, truth: Truth) -> Inputs:
    return inputs if truth.excerpt is None else truth.excerpt.inputs(inputs)


def _part_of_results(results: Results, truth: Truth) -> Results:
    return results if truth.excerpt is None else truth.excerpt.results(results)


def _require_unchanged(before: Inputs, after: Inputs, truth: Truth, what: str) -> None:
    for name, x in tensors(after).items():
        if name not in truth.mutated and not _same_bits(x, before[name]):
            raise DishonestError(f"{what}: changed its input {name}")


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())
