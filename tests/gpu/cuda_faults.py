"""Faults planted in the sources in CUDA C++, each found by the op's checks: run by `make test-gpu`.

`PYTHONPATH=src python3 tests/gpu/cuda_faults.py [OP ...] [--jobs N]` on a Hopper GPU. Each fault is
a line of a source replaced in a copy, checked in a process of its own, since a faulty kernel may
hang or take its process along; both count as found. The exit status is 1 where one is missed, or
where the same checks are red without a fault.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from decode_faults import DECODE
from planting import planted
from products_faults import PRODUCTS

OPS = {"experts_mxfp4": PRODUCTS, "mla_decode": DECODE}
SECONDS = 240
"""For a process, of several at a time: it starts, compiles the source, and runs one check."""


class Asked(NamedTuple):
    op: str
    fault: str
    """Empty: none."""


def asked(ops: list[str]) -> list[Asked]:
    """Every op without a fault, which runs all checks, and then each fault; the slowest first."""
    faults = [Asked(op, name) for op in ops for name in OPS[op].named]
    return [*(Asked(op, "") for op in ops), *sorted(faults, key=_rank)]


def _rank(one: Asked) -> int:
    op = OPS[one.op]
    return list(op.checks).index(op.named[one.fault].found_by)


def reds(one: Asked) -> list[str]:
    """The first thing that is wrong with that fault, or all with none."""
    op = OPS[one.op]
    with tempfile.TemporaryDirectory() as folder:
        checks = list(op.checks)
        if one.fault:
            fault, (header,) = op.named[one.fault], op.programs.HEADERS
            source, header = planted(fault, op.programs.SOURCE, header, Path(folder))
            op.programs.SOURCE, op.programs.HEADERS = source, (header,)
            # Machine code of faults is not kept.
            os.environ["XDG_CACHE_HOME"] = folder
            op.programs.kernel_of.cache_clear()
            checks = [fault.found_by]
        red = []
        for result in (result for name in checks for result in op.checks[name]()):
            if not result.passed:
                red.append(f"{result.case}: {result.what} {result.error:.1e}")
                if one.fault:
                    break
        return red


def verdict(one: Asked) -> str:
    """What a process of its own says: nothing where all is green."""
    command = [sys.executable, __file__, one.op, "--fault", one.fault]
    try:
        done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing in {SECONDS} s"
    if done.returncode and not done.stdout.strip():
        return f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; all")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for unknown in (op for op in args.op if op not in OPS):
        parser.error(f"{unknown} has no source in CUDA C++ with faults: {', '.join(OPS)}")
    if args.fault is not None:
        print("\n".join(reds(Asked(args.op[0], args.fault))))
        return 0
    ops = args.op or list(OPS)
    device = torch.device("cuda", torch.cuda.current_device())
    for op in ops:
        if not OPS[op].programs.is_available(device):
            print(f"the programs of {op} do not run on this GPU")
            return 1
    everything, start, missed = asked(ops), time.perf_counter(), 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for one, found in zip(everything, pool.map(verdict, everything), strict=True):
            good = bool(found) == bool(one.fault)
            missed += not good
            word = "ok" if good else "MISSED" if one.fault else "RED"
            seconds, name = time.perf_counter() - start, one.fault or "(no fault)"
            shown = found.partition("\n")[0]
            print(f"{seconds:6.1f} s  {one.op:13} {name:38} {word:7} {shown}", flush=True)
    print(f"{len(everything) - len(ops)} faults, {missed} wrong answers")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
