"""Faults planted in MLA decode's CUDA C++, each found by the op's checks: run by `make test-gpu`.

`PYTHONPATH=src python3 tests/gpu/decode_faults.py [--jobs N]` on a Hopper GPU. Each fault is a line
of the source replaced in a copy, checked in a process of its own, since a faulty kernel may hang or
take its process along; both count as found. The exit status is 1 where one is missed, or where the
same checks are red without a fault.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

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
SECONDS = 240
"""For a process, of several at a time: it starts, compiles the source, and runs one family."""


class Fault(NamedTuple):
    right: str
    """Stands once in the source, or in its header."""
    wrong: str
    found_by: str = CONFORMANCE


FAULTS = {
    "programs without a share": Fault("(total + teams - 1) / teams", "total / teams"),
    "parts numbered from before": Fault("begins[n + 1] = end;", "begins[n + 1] = end - tiles;"),
    "a hole is the first page": Fault("page < 0 ? -TOKENS", "page < 0 ? 0"),
    "a hole is seen": Fault("geti(s + AT_ROWS + 4 * (k % AHEAD)) < 0 ? 0 : seen", "seen"),
    "rows behind the last": Fault("if (here < TOKENS) {", "if (here < 0) {"),
    "NaN behind the last row": Fault("if (left < TOKENS) {", "if (left < 0) {"),
    "shares without a limit": Fault("FAR = 64.f", "FAR = 1e30f"),
    "reference forgotten": Fault("put(at + AT_REFERENCE, a);", "put(at + AT_REFERENCE, 0.f);"),
    "reference not in the sum": Fault(
        "float own = get(at + AT_REFERENCE) + log2_(total)", "float own = log2_(total)"
    ),
    "sums of one group": Fault(
        "if (GROUP == 1) total += half_sum(s, GROUP);", "if (GROUP == 1) total = 1.f;"
    ),
    "half of a sum": Fault("total += __shfl_xor_sync(~0u, total, 1);", ""),
    "parts faded by the other's share": Fault(
        "faded = sum > 0.f ? b / sum : 0.f;", "faded = sum > 0.f ? a / sum : 0.f;"
    ),
    "channels twice": Fault("mix(o[2], s, ring.place(5 +", "mix(o[2], s, ring.place(3 +"),
    "channels in another order": Fault("(box - 1) / 2 + (box - 1) % 2 * 4", "(box - 1)"),
    "old outputs in the first sum": Fault("step > 0 ? 1 : adds", "1"),
    "shares of neighbours": Fault(': "f"(high), "f"(low)', ': "f"(low), "f"(high)'),
    "later tokens are seen": Fault(
        "min(x.length[n] - (x.queries - 1) + row / x.heads - tile * TOKENS, left)", "left", LENGTHS
    ),
    "first query token for all": Fault(
        "row = block % (x.query_rows / HEADS) * HEADS;", "row = 0;", LENGTHS
    ),
    "rows not looked up ahead": Fault("k % 32 == 0 && k > 0", "k % 32 == 0 && k > 4096", LENGTHS),
}  # fmt: skip


def planted(fault: Fault, source: Path, header: Path, folder: Path) -> tuple[Path, Path]:
    """Copies of both in `folder`, the fault in one of them.

    Raises:
        ValueError: what it replaces does not stand there once.
    """
    texts = [path.read_text() for path in (source, header)]
    if sum(text.count(fault.right) for text in texts) != 1:
        raise ValueError(f"{fault.right!r} does not stand once in {source.name} and its header")
    copies = folder / source.name, folder / header.name
    for copy, text in zip(copies, texts, strict=True):
        copy.write_text(text.replace(fault.right, fault.wrong))
    return copies


def results(found_by: str) -> Iterator[CheckResult]:
    """Of the checks that see what these programs make."""
    declared = spec(OP)
    if found_by == CONFORMANCE:
        cases = {name: declared.cases[name] for name in CASES}
        in_bf16 = replace(declared, cases=cases, backend_tolerance={"cuda": BF16})
        yield from check(in_bf16, backend="cuda", tier="gpu")
        return
    for subject in subjects(declared, 0, "cuda", "gpu"):
        if subject.dtype == torch.bfloat16 and subject.width == sum(BOXED_CHANNELS):
            few = replace(subject.sizes, rows=ROWS)
            yield from check_family(replace(subject, sizes=few), found_by)


def reds(name: str) -> list[str]:
    """The first thing that is wrong with that fault, or all with none."""
    with tempfile.TemporaryDirectory() as folder:
        found_by: tuple[str, ...] = (CONFORMANCE, LENGTHS)
        if name:
            fault, (header,) = FAULTS[name], cuda_decode.HEADERS
            source, header = planted(fault, cuda_decode.SOURCE, header, Path(folder))
            cuda_decode.SOURCE, cuda_decode.HEADERS = source, (header,)
            # Machine code of faults is not kept.
            os.environ["XDG_CACHE_HOME"] = folder
            cuda_decode.kernel_of.cache_clear()
            found_by = (fault.found_by,)
        red = []
        for result in (result for family in found_by for result in results(family)):
            if not result.passed:
                red.append(f"{result.case}: {result.what} {result.error:.1e}")
                if name:
                    break
        return red


def verdict(name: str) -> str:
    """What a process of its own says: nothing where all is green."""
    command = [sys.executable, __file__, "--fault", name]
    try:
        done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing in {SECONDS} s"
    if done.returncode and not done.stdout.strip():
        return f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fault is not None:
        print("\n".join(reds(args.fault)))
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    if not cuda_decode.is_available(device):
        print("these programs do not run on this GPU")
        return 1
    start, missed = time.perf_counter(), 0
    with ThreadPoolExecutor(args.jobs) as pool:
        # The longest ones first.
        names = ["", *sorted(FAULTS, key=lambda name: FAULTS[name].found_by != LENGTHS)]
        for name, found in zip(names, pool.map(verdict, names), strict=True):
            good = bool(found) == bool(name)
            missed += not good
            word = "ok" if good else "MISSED" if name else "RED"
            seconds = time.perf_counter() - start
            shown = found.partition("\n")[0]
            print(f"{seconds:6.1f} s  {name or '(no fault)':34} {word:7} {shown}", flush=True)
    print(f"{len(FAULTS)} faults, {missed} wrong answers")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
