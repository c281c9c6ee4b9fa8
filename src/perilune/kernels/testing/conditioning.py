"""What a half-precision result may be off by where its truth is ill-conditioned.

A gradient that is a sum over all tokens may cancel to a tenth of its terms, and a score of two
orthogonal vectors to nothing: then even exact arithmetic on inputs that are moved by less than
their own rounding gives another result. Design note 0002 says why that, and nothing else, is
granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import Results, relative_error
from perilune.kernels.testing.result import Finding
from perilune.kernels.testing.run import as_double, run

DRAWS = 4
ROUNDINGS = 3.0
"""A kernel of several products rounds each operand that it makes, as its inputs were rounded once:
the deepest chain here has nine (`kda_chunk`), and errors that are independent add up by squares."""
_PREFIX = "inference "


def conditioned(
    findings: Iterable[Finding],
    dtype: torch.dtype,
    oracle: Callable[..., Any],
    inputs: Inputs,
    want: Results,
    *,
    grad: bool,
) -> Iterator[Finding]:
    """The findings; those of a half-precision `dtype` that are out of bound, with the bound that
    the truth's own movement grants. The oracle is asked only then."""
    moved: dict[str, float] | None = None
    for what, error, bound in findings:
        if error <= bound or dtype.itemsize > 2:
            yield Finding(what, error, bound)
            continue
        if moved is None:
            moved = movement(dtype, oracle, inputs, want, grad=grad)
        plain = what.removeprefix(_PREFIX)
        yield Finding(what, error, max(bound, ROUNDINGS * moved.get(plain, 0.0)))


def movement(
    dtype: torch.dtype, oracle: Callable[..., Any], inputs: Inputs, want: Results, *, grad: bool
) -> dict[str, float]:
    """Root mean square of the relative change of every result when every floating-point input is
    moved by up to half a unit in its last place, at random."""
    squares = dict.fromkeys(want, 0.0)
    generator = torch.Generator().manual_seed(11)
    for _ in range(DRAWS):
        wide = as_double(inputs)
        for value in wide.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                away = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5
                value.data *= 1 + torch.finfo(dtype).eps * away.to(value.device)
        found = run(oracle, wide, grad=grad)
        for what, value in want.items():
            squares[what] += relative_error(found[what], value) ** 2 if what in found else 0.0
    return {what: (total / DRAWS) ** 0.5 for what, total in squares.items()}
