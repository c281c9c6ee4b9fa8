"""`perilune kernels bench|gate`: how fast the ops are, and whether they still are."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from perilune.cli import kernels_layer
from perilune.cli.result_options import RESULTS, add_result_options
from perilune.core.env import num_threads
from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.cases import bench
from perilune.kernels.bench.ceilings import measure_ceilings
from perilune.kernels.bench.environment import environment, require_comparable
from perilune.kernels.bench.errors import RefusedError
from perilune.kernels.bench.gate import judge, stored_medians
from perilune.kernels.bench.peers import versions
from perilune.kernels.bench.results import Row, describe, load, path_for, save
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.runner import Bencher
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.bench.table import markdown, plain
from perilune.kernels.registry import OPS


def add_arguments(actions: Any) -> None:
    """Adds both commands to the actions of `perilune kernels`."""
    measuring = actions.add_parser("bench", help="time ops beside their peers; red ops are refused")
    measuring.add_argument("op", nargs="?", metavar="OP", help="one op, or layer (default: all)")
    measuring.add_argument("--case", metavar="NAME", help="only this case")
    measuring.add_argument("--backend", metavar="B", help="reference, or the device's own backend")
    measuring.add_argument("--seconds", type=_seconds, default=2.0, metavar="S", help="a case (2)")
    add_result_options(measuring, "kernels")
    measuring.add_argument(
        "--table", type=Path, metavar="FILE", help="only print a result file as a Markdown table"
    )
    gate = actions.add_parser("gate", help="compare with stored medians; fails on a regression")
    gate.add_argument("op", nargs="?", metavar="OP", help="one op (default: all in the file)")
    gate.add_argument("--against", type=Path, required=True, metavar="FILE", help="a result file")
    gate.add_argument(
        "--seconds", type=_seconds, default=2.0, metavar="S", help="a run of a case (2)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return seconds


def run_bench(args: argparse.Namespace) -> int:
    """Measures and prints; 1 where a case was refused.

    Raises:
        UnsupportedError: no such op or case, or no case for this device.
    """
    if args.table is not None:
        print(markdown(args.table))
        return 0
    device = _device()
    if args.op == kernels_layer.NAME:
        return _run_layer(args, device)
    cases = list(_chosen_cases(args.op, args.case, device.type))
    peers = [peer for op, case in cases for peer in bench(op).cases[case].peers]
    env = environment(device, versions(peers), args.commit)
    bencher = _bencher(device, env, args.seconds)
    env["ceilings"] = bencher.ceilings._asdict()
    rows: list[Row] = []
    refused = 0
    for op, case in cases:
        print(f"{op} {case}", file=sys.stderr)
        try:
            measured = bencher.rows(op, case, args.backend)
        except RefusedError as error:
            refused += 1
            print(f"refused: {error}", file=sys.stderr)
            continue
        rows += measured
        if args.save is not None:
            save(path_for(args.save, env, RESULTS), env, measured)
    print(_report(env, rows, refused))
    return 1 if refused else 0


def _run_layer(args: argparse.Namespace, device: torch.device) -> int:
    kernels_layer.require(args.case, args.backend, device.type)
    env = environment(device, versions(bench("kda_chunk").cases["T8192_H96"].peers), args.commit)
    bencher = _bencher(device, env, args.seconds)
    env["ceilings"] = bencher.ceilings._asdict()
    told = (bencher.ceilings, args.seconds, env["commit"], bencher.date)
    rows: list[Row] = []
    for name, measured in kernels_layer.measured(args.case, device, *told):
        print(f"{kernels_layer.NAME} {name}", file=sys.stderr)
        rows += measured
        if args.save is not None:
            save(path_for(args.save, env, RESULTS), env, measured)
    print(_report(env, rows, 0))
    return 0


def run_gate(args: argparse.Namespace) -> int:
    """Prints a verdict a stored case; 1 where one is slower, or cannot be judged.

    Raises:
        UnsupportedError: the file is of another GPU, driver or Triton, or holds no such op.
        RefusedError: a stored case may not be timed any more.
    """
    device = _device()
    stored = load(args.against)
    env = environment(device, {}, None)
    require_comparable(stored.env, env, args.against)
    if not stored_medians(stored.rows, args.op):
        raise UnsupportedError(f"{args.against} holds no case of {args.op or 'any op'}")
    failed = 0
    for verdict in judge(_bencher(device, env, args.seconds), stored.rows, args.op):
        print(verdict, flush=True)
        failed += not verdict.passed
    return 1 if failed else 0


def _device() -> torch.device:
    threads = num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _bencher(device: torch.device, env: dict[str, Any], seconds: float) -> Bencher:
    clock = stopwatch(device)
    return Bencher(
        device=device,
        device_name=env["gpu"],
        stopwatch=clock,
        settings=Settings(seconds=seconds),
        ceilings=measure_ceilings(device, clock),
        date=datetime.now(UTC).date().isoformat(),
        commit=env["commit"],
    )


def _chosen_cases(op: str | None, case: str | None, device: str) -> Iterator[tuple[str, str]]:
    found = False
    for name in OPS if op is None else (op,):
        for label, declared in bench(name).cases.items():
            if declared.device == device and case in (None, label):
                found = True
                yield name, label
    if not found:
        raise UnsupportedError(f"{op or 'no op'} has no case {case or ''} for {device}")


def _report(env: dict[str, Any], rows: list[Row], refused: int) -> str:
    rates = env["ceilings"]
    copy, matmul = rates["bytes_per_s"] / 1e9, rates["flops_per_s"] / 1e12
    ceilings = f"copy {copy:.0f} GB/s, matmul {matmul:.3g} TFLOP/s"
    tail = f"\n\n{refused} case(s) refused" if refused else ""
    return f"{describe(env)}\n{ceilings}\n\n{plain(rows)}{tail}"
