"""Faults of MLA decode in CUDA C++, and the checks of the op that find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from planting import Fault, Faults

from perilune.kernels.common.cases import BF16
from perilune.kernels.mla import cuda_decode
from perilune.kernels.mla.triton_decode_rows import BOXED_CHANNELS
from perilune.kernels.registry import spec
from perilune.kernels.testing import CheckResult, check
from perilune.kernels.testing.properties import check_family, subjects

OP = "mla_decode"
CASES = ("k3_rows", "k3_far_apart", "k3_holes", "k3_rises")
"""Of the conformance, those that programs in CUDA C++ serve."""
ROWS = (1, 16, 65)
"""Of the lengths that the gpu tier has: those of 96 heads with one, two and 16 query tokens, the
last with long shares. Thousands of sequences take a minute to draw."""
CONFORMANCE, LENGTHS = "conformance", "lengths"


def conformance() -> Iterator[CheckResult]:
    declared = spec(OP)
    cases = {name: declared.cases[name] for name in CASES}
    in_bf16 = replace(declared, cases=cases, backend_tolerance={"cuda": BF16})
    yield from check(in_bf16, backend="cuda", tier="gpu")


def lengths() -> Iterator[CheckResult]:
    for subject in subjects(spec(OP), 0, "cuda", "gpu"):
        if subject.dtype == torch.bfloat16 and subject.width == sum(BOXED_CHANNELS):
            few = replace(subject.sizes, rows=ROWS)
            yield from check_family(replace(subject, sizes=few), LENGTHS)


FAULTS = {
    "programs without a share": Fault("(total + teams - 1) / teams", "total / teams", CONFORMANCE),
    "parts numbered from before": Fault(
        "begins[n + 1] = end;", "begins[n + 1] = end - tiles;", CONFORMANCE
    ),
    "a hole is the first page": Fault("page < 0 ? -TOKENS", "page < 0 ? 0", CONFORMANCE),
    "a hole is seen": Fault(
        "geti(s + AT_ROWS + 4 * (k % AHEAD)) < 0 ? 0 : seen", "seen", CONFORMANCE
    ),
    "rows behind the last": Fault("if (here < TOKENS) {", "if (here < 0) {", CONFORMANCE),
    "NaN behind the last row": Fault("if (left < TOKENS) {", "if (left < 0) {", CONFORMANCE),
    "shares without a limit": Fault("FAR = 64.f", "FAR = 1e30f", CONFORMANCE),
    "reference forgotten": Fault(
        "put(at + AT_REFERENCE, a);", "put(at + AT_REFERENCE, 0.f);", CONFORMANCE
    ),
    "reference not in the sum": Fault(
        "float own = get(at + AT_REFERENCE) + log2_(total)", "float own = log2_(total)", CONFORMANCE
    ),
    "sums of one group": Fault(
        "if (GROUP == 1) total += half_sum(s, GROUP);", "if (GROUP == 1) total = 1.f;", CONFORMANCE
    ),
    "half of a sum": Fault("total += __shfl_xor_sync(~0u, total, 1);", "", CONFORMANCE),
    "parts faded by the other's share": Fault(
        "faded = sum > 0.f ? b / sum : 0.f;", "faded = sum > 0.f ? a / sum : 0.f;", CONFORMANCE
    ),
    "channels twice": Fault(
        "mix(o[2], s, ring.place(5 +", "mix(o[2], s, ring.place(3 +", CONFORMANCE
    ),
    "channels in another order": Fault(
        "(box - 1) / 2 + (box - 1) % 2 * 4", "(box - 1)", CONFORMANCE
    ),
    "old outputs in the first sum": Fault("step > 0 ? 1 : adds", "1", CONFORMANCE),
    "shares of neighbours": Fault(': "f"(high), "f"(low)', ': "f"(low), "f"(high)', CONFORMANCE),
    "later tokens are seen": Fault(
        "min(x.length[n] - (x.queries - 1) + row / x.heads - tile * TOKENS, left)", "left", LENGTHS
    ),
    "first query token for all": Fault(
        "row = block % (x.query_rows / HEADS) * HEADS;", "row = 0;", LENGTHS
    ),
    "rows not looked up ahead": Fault("k % 32 == 0 && k > 0", "k % 32 == 0 && k > 4096", LENGTHS),
}

DECODE = Faults(cuda_decode, FAULTS, {LENGTHS: lengths, CONFORMANCE: conformance})
