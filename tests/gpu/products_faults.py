"""Faults of the experts' products from MXFP4 in CUDA C++, and the checks of the op that find them.

What is written beside its place, or read before it is there, is found on some days only: no such
fault stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from planting import Fault, Faults

from perilune.kernels.common.cases import BF16
from perilune.kernels.experts import cuda_products, shared_out
from perilune.kernels.registry import spec
from perilune.kernels.testing import CheckResult, check
from perilune.kernels.testing.properties import check_family, subjects

OP = "experts_mxfp4"
FEW_CASES = ("long_rows", "up_to_32_each", "swi_glu", "other_caps", "elsewhere", "one_overloaded")
MANY_CASES = ("long_rows_crowded", "crowded")
"""Of the conformance, those that programs for few, and for many, tokens of an expert serve."""
FEW_COUNTS = (1, 9, 17, 25, 8, 16, 24, 32)
MANY_COUNTS = (1, 41, 49, 57, 65, 73, 81, 89, 48, 56, 64, 72, 80, 88, 96)
"""Tokens of an expert: every width of a product, as full as it can be and with one token more than
the width before."""
TOKENS = 33
"""NaN in one of so many reaches the tail of another one's row, where it does."""
MANY, FEW, POISON = "many", "few", "poison"


def many() -> Iterator[CheckResult]:
    yield from _conformance(MANY_CASES)
    yield from _widths(MANY_COUNTS)


def few() -> Iterator[CheckResult]:
    yield from _conformance(FEW_CASES)
    yield from _widths(FEW_COUNTS)


def poison() -> Iterator[CheckResult]:
    for subject in subjects(spec(OP), 0, "cuda", "gpu"):
        if subject.dtype == torch.bfloat16:
            one = replace(subject.sizes, rows_drawn=(TOKENS,))
            yield from check_family(replace(subject, sizes=one), POISON)


def _conformance(cases: tuple[str, ...]) -> Iterator[CheckResult]:
    return _checked({name: spec(OP).cases[name] for name in cases}, spec(OP).oracle)


def _widths(counts: tuple[int, ...]) -> Iterator[CheckResult]:
    """Held up by the reference in float64: the oracle takes one number after the other."""
    cases = {"every width": lambda g, d: shared_out(g, d, counts, width=72, inner=96)}
    return _checked(cases, spec(OP).reference)


def _checked(cases: Mapping, oracle: str) -> Iterator[CheckResult]:
    bounds = {"cuda": BF16}
    declared = replace(spec(OP), cases=cases, oracle=oracle, backend_tolerance=bounds)
    return check(declared, backend="cuda", tier="gpu")


FAULTS = {
    "scales of the other row": Fault("0x4140 + 0x101 * BYTE", "0x4041 + 0x101 * BYTE", FEW),
    "scales of the next tile": Fault("s[m] += 2 * TILE_BYTES", "s[m] += TILE_BYTES", FEW),
    "halves of a tile swapped": Fault("HALF * 2048", "(1 - HALF) * 2048", FEW),
    "signs lost": Fault("0x81C081C0", "0x01C001C0", FEW),
    "second pair a bit off": Fault("(word, word, 12)", "(word, word, 11)", FEW),
    "lower row with the upper one's scale": Fault(
        "times<true>(__funnelshift_l", "times<false>(__funnelshift_l", FEW
    ),
    "row tiles swapped": Fault("row_tiles + row_tile + m;", "row_tiles + row_tile + (m ^ 1);", FEW),
    "first expert for all": Fault("static_cast<long>(expert)", "0l", FEW),
    "pairs in their own order": Fault("work.pair ? work.pair[place] : place", "place", FEW),
    "first place forgotten": Fault("first + i * COPIED_ROWS", "i * COPIED_ROWS", FEW),
    "last columns lost": Fault(
        "k * 256 + chunk * 16 < work", "k * 256 + chunk * 16 + 16 < work", FEW
    ),
    "columns behind the last": Fault("inside ? x_bytes[i] : 0", "x_bytes[i]", POISON),
    "no swizzle": Fault("((chunk ^ row) & 7)", "(chunk & 7)", FEW),
    "a stage too few": Fault("operand(ring + k % STAGES", "operand(ring + k % (STAGES - 1)", FEW),
    "odd column tile lost": Fault(
        "k < work.column_tiles; k += 2", "k + 1 < work.column_tiles; k += 2", FEW
    ),
    "last words not read": Fault("more = k + 2 < work", "more = k + 3 < work", FEW),
    "gate for up": Fault("glu(upper, lower,", "glu(lower, upper,", FEW),
    "one cap for both": Fault("capped(up, linear_beta)", "capped(up, beta)", FEW),
    "upper row twice": Fault("y[o + 8] = lower;", "y[o + 8] = upper;", FEW),
    "eight tokens too few": Fault("tile[2] - tile[1] + 7", "tile[2] - tile[1]", FEW),
    "no program of 72 columns": Fault("    CASE(72)\n", "", MANY),
    "operands of 88 columns swapped": Fault("O44, 44, 45,", "O44, 45, 44,", MANY),
    "second warp group with the first one's rows": Fault("* GROUPS + group)", "* GROUPS)", MANY),
}

PRODUCTS = Faults(cuda_products, FAULTS, {MANY: many, FEW: few, POISON: poison})
