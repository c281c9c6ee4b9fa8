"""`perilune kernels list|check`: the ops, what runs them, and proof that it computes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tqdm import tqdm

from perilune.kernels.registry import OPS, OpSpec, spec
from perilune.kernels.testing import REFERENCE, CheckResult, check, is_here

BACKENDS = (REFERENCE, "cpu", "cuda")
CHECK_COLUMNS = ("op", "case", "backend", "what", "error", "bound", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="every op: signature, reference, backends by device")
    checks = actions.add_parser("check", help="compare with the float64 truth, gradients included")
    checks.add_argument("op", nargs="?", metavar="OP", help="one op (default: all)")
    checks.add_argument(
        "--backend",
        choices=BACKENDS,
        help="only the reference, or only what runs on that device (default: all that can run)",
    )
    checks.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the random inputs")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action; 1 where a check is red.

    Raises:
        UnsupportedError: there is no op of the given name, or no such device here.
    """
    return {"list": _list, "check": _check}[args.action](args)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, not {text!r}")
    return int(text)


def _list(args: argparse.Namespace) -> int:
    print("\n\n".join(describe(spec(name)) for name in OPS))
    return 0


def describe(op: OpSpec) -> str:
    """The entry of one op in `kernels list`."""
    rows = [("reference", op.reference), *sorted(op.backends.items())]
    lines = [f"  {name:<10} {path}" for name, path in rows]
    return "\n".join([f"{op.name}{op.signature}", *lines])


def _check(args: argparse.Namespace) -> int:
    specs = [spec(args.op)] if args.op is not None else [spec(name) for name in OPS]
    results = list(_results(specs, args.seed, args.backend))
    print(table(results))
    for left_out in unchecked(specs) if args.backend is None else ():
        print(f"\nnot checked here: {left_out}")
    red = sum(not result.passed for result in results)
    print(f"\n{len(results)} checks of {len(specs)} op(s), seed {args.seed}: {red} red")
    return 1 if red else 0


def unchecked(specs: Sequence[OpSpec]) -> list[str]:
    """The declared backends whose device this machine lacks."""
    pairs = [(op.name, device) for op in specs for device in op.backends if not is_here(device)]
    return [f"{name} on {device} (no {device} device)" for name, device in pairs]


def _results(specs: Sequence[OpSpec], seed: int, backend: str | None) -> Iterator[CheckResult]:
    total = sum(len(op.cases) for op in specs)
    with tqdm(total=total, unit="case", leave=False, disable=not sys.stderr.isatty()) as bar:
        for op in specs:
            bar.set_description(op.name)
            for name, make in op.cases.items():
                yield from check(replace(op, cases={name: make}), seed=seed, backend=backend)
                bar.update()


def table(results: Sequence[CheckResult]) -> str:
    """One line a check, in columns."""
    rows = [CHECK_COLUMNS]
    for r in results:
        verdict = "ok" if r.passed else "RED"
        rows.append((*r[:4], f"{r.error:.1e}", f"{r.bound:.0e}", verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(CHECK_COLUMNS))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
