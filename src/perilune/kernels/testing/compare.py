"""How far two results are apart, and whether they are the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.kernels.registry import Tolerance
from perilune.kernels.testing.result import Finding

Results = dict[str, Tensor]
"""`output i`, `after NAME` of an input that changed, `grad NAME`."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN and infinities never pass."""
    got, want = got.double().cpu(), want.double().cpu()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.norm())
    gap = float((got - want).norm())
    return gap / scale if scale else gap


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (a, b)))


def compare(got: Results, want: Results, tolerance: Tolerance) -> Iterator[Finding]:
    """Every result within its bound of the truth.

    A gradient or a state that only one of them has is as wrong as can be.
    """
    for what in dict.fromkeys([*want, *got]):
        bound = tolerance.backward if what.startswith("grad ") else tolerance.forward
        both = what in want and what in got
        yield Finding(what, relative_error(got[what], want[what]) if both else math.inf, bound)


def identical(got: Results, want: Results) -> Iterator[Finding]:
    """Every result the same bits."""
    for what in dict.fromkeys([*want, *got]):
        same = what in want and what in got and same_bits(got[what], want[what])
        yield holds(f"{what} bitwise", same)


def holds(what: str, true: bool) -> Finding:
    """A property that is there or not."""
    return Finding(what, 0.0 if true else math.inf, 0.0)
