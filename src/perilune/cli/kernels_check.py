"""`perilune kernels check`: proof that the ops compute what they say."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from tqdm import tqdm

from perilune.cli.result_options import count
from perilune.core.errors import UnsupportedError
from perilune.kernels import verdict
from perilune.kernels.plugins import load_all
from perilune.kernels.registry import OPS, OpSpec, spec
from perilune.kernels.serving import op_folder
from perilune.kernels.testing import (
    TIERS,
    Asked,
    CheckResult,
    check,
    check_in_processes,
    check_properties,
    implementations,
    is_here,
    is_plugin,
    refusals,
    use_interpreter,
)

_COLUMNS = ("op", "backend", "family", "checks", "red", "refused")
_VERBOSE_COLUMNS = ("op", "backend", "family", "case", "what", "error", "bound", "seed", "")


def add_arguments(actions: Any) -> None:
    """Adds the command to the actions of `perilune kernels`."""
    checks = actions.add_parser("check", help="hold ops to the float64 truth and their properties")
    checks.add_argument("op", nargs="?", metavar="OP", help="one op (default: all)")
    checks.add_argument(
        "--backend",
        metavar="NAME",
        help="only the reference, only what runs on that device (cpu, cuda), or only that plug-in,"
        " which may serve when all is green (default: perilune's own that can run)",
    )
    checks.add_argument(
        "--tier",
        choices=TIERS,
        help="cpu: small sizes, Triton interpreted; gpu: full sizes (default: gpu if one is here)",
    )
    checks.add_argument(
        "--seed", type=_seed, metavar="N", help="beside the fixed ones (default: drawn anew)"
    )
    checks.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="processes that share the work (default: 1); on a GPU most of it is compiling",
    )
    checks.add_argument("--verbose", action="store_true", help="a line for every check")


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, not {text!r}")
    return int(text)


def run_check(args: argparse.Namespace) -> int:
    """Checks and prints; 1 where a check is red.

    Raises:
        UnsupportedError: there is no op of the given name, or no such device here.
    """
    specs = [spec(name) for name in _asked(args.op, args.backend)]
    tier = args.tier or ("gpu" if is_here("cuda") else "cpu")
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    runnable = _runnable(specs, args.backend, tier)
    results = list(_results(runnable, Asked(seed, args.backend, tier), args.jobs))
    print(verbose_table(results) if args.verbose else table(results))
    red = [result for result in results if not result.passed]
    for result in () if args.verbose else red:
        print(f"\nRED {described(result)}")
    for left_out in unchecked(specs, tier) if args.backend is None else ():
        print(f"\nnot checked here: {left_out}")
    print(f"\n{len(results)} checks of {len(runnable)} op(s), tier {tier}: {len(red)} red")
    print(f"seed {seed} beside the fixed ones (repeat with --seed {seed})")
    if args.backend is not None and is_plugin(args.backend):
        for op in runnable:
            print(_settled(op, args.backend, tier, results, seed))
    return 1 if red else 0


def _asked(op: str | None, backend: str | None) -> list[str]:
    """That op, or all ops: of a plug-in those that it is registered for."""
    if op is not None:
        return [op]
    if backend is None or not is_plugin(backend):
        return list(OPS)
    registered, broken = load_all(backend)
    if not registered:
        reasons = "; ".join(map(str, broken))
        raise UnsupportedError(reasons or f"no plug-in is called {backend!r}")
    served = {each.plugin.op for each in registered}
    return [name for name in OPS if name in served]


def _settled(op: OpSpec, backend: str, tier: str, results: Sequence[CheckResult], seed: int) -> str:
    """Keeps the verdict on a plug-in, or takes an earlier one back; what that means to the user."""
    mine = [result for result in results if result.op == op.name]
    green = all(result.passed for result in mine)
    lines = []
    for each in implementations(op, backend, tier):
        assert each.plugin is not None
        where = verdict.device_name(each.device)
        if not green:
            verdict.forget(each.plugin, each.device)
            lines.append(f"{each.plugin} may not serve {op.name} on {where}")
            continue
        counts = {"checks": len(mine), "refused": sum(result.refused for result in mine)}
        path = verdict.write(op_folder(op), each.plugin, each.device, **counts, seed=seed)
        lines.append(
            f"{each.plugin} may serve {op.name} on {where}, with"
            f" PERILUNE_KERNELS={op.name}={backend} (kept in {path})"
        )
    return "\n".join(lines)


def _runnable(specs: Sequence[OpSpec], backend: str | None, tier: str) -> list[OpSpec]:
    """The ops of which something can run; Triton is told if it has to be interpreted.

    Raises:
        UnsupportedError: there is none.
    """
    runnable, refusals = [], []
    for op in specs:
        try:
            chosen = implementations(op, backend, tier)
        except UnsupportedError as error:
            refusals.append(error)
            continue
        runnable.append(op)
        if any(each.interpreted for each in chosen):
            use_interpreter()
    if not runnable:
        raise refusals[0]
    return runnable


def _results(specs: Sequence[OpSpec], asked: Asked, jobs: int) -> Iterator[CheckResult]:
    seed, backend, tier = asked
    found_of = _in_turn(specs, asked) if jobs == 1 else check_in_processes(specs, asked, jobs)
    hidden = not sys.stderr.isatty()
    with closing(found_of), tqdm(total=len(specs), unit="op", leave=False, disable=hidden) as bar:
        for op in specs:
            bar.set_description(op.name)
            found = next(found_of)
            yield from found
            yield from refusals(op, implementations(op, backend, tier), found, seed)
            bar.update()


def _in_turn(specs: Sequence[OpSpec], asked: Asked) -> Generator[list[CheckResult]]:
    seed, backend, tier = asked
    truths: dict[Any, Any] = {}
    for op in specs:
        found = list(check(op, seed=seed, backend=backend, tier=tier))
        found += check_properties(op, drawn=seed, backend=backend, tier=tier, truths=truths)
        yield found


def unchecked(specs: Sequence[OpSpec], tier: str) -> list[str]:
    """The declared backends that nothing stands for here."""
    left_out = []
    for op in specs:
        checked = {each.backend for each in implementations(op, tier=tier)}
        for device in op.backends:
            why = f"not on tier {tier}" if is_here(device) else f"no {device} device"
            left_out += [] if device in checked else [f"{op.name} on {device} ({why})"]
    return left_out


def described(result: CheckResult) -> str:
    """A red check in words: the input that reveals it, and how to see it again."""
    where = f"{result.op}, {result.backend}, {result.family}, {result.case}: {result.what}"
    backend = result.backend.split()[0]
    named = f" --backend {backend}" if is_plugin(backend) else ""
    again = f"perilune kernels check {result.op}{named} --seed {result.seed}"
    return f"{where}: error {result.error:.1e}, bound {result.bound:.0e} ({again})"


def table(results: Sequence[CheckResult]) -> str:
    """How many checks of each family, and how many of them are red or refused."""
    counts: dict[tuple[str, ...], list[int]] = {}
    for r in results:
        count = counts.setdefault((r.op, r.backend, r.family), [0, 0, 0])
        count[0] += 1
        count[1] += not r.passed
        count[2] += r.refused
    return _columns([_COLUMNS, *((*key, *map(str, count)) for key, count in counts.items())])


def verbose_table(results: Sequence[CheckResult]) -> str:
    """One line a check."""
    rows: list[tuple[str, ...]] = [_VERBOSE_COLUMNS]
    for r in results:
        verdict = "refused" if r.refused else "ok" if r.passed else "RED"
        numbers = (f"{r.error:.1e}", f"{r.bound:.0e}", str(r.seed))
        rows.append((r.op, r.backend, r.family, r.case, r.what, *numbers, verdict))
    return _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
