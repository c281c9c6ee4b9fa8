"""`perilune bench contexts`: decoding and prefill at long contexts, beside all-MLA and GQA.

Where torch is installed and the server's packages are not, as on a bare GPU machine:
`python -m perilune.cli.bench_contexts`, with the same options.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from perilune.cli.bench_contexts_options import add_contexts_options
from perilune.cli.result_options import RESULTS, UNCHECKED
from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.ceilings import measure_ceilings
from perilune.kernels.bench.environment import environment, require_comparable
from perilune.kernels.bench.results import path_for
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.model.contexts.plan import Case, planned
from perilune.model.contexts.rows import DecodeRow, PrefillRow, ResultFile, load, save
from perilune.model.contexts.run import Bench, Failed, require_green_ops
from perilune.model.contexts.tables import report
from perilune.model.presets import preset

LEAST_GPU_BYTES = 140e9


def run(args: argparse.Namespace) -> int:
    """1 where a case failed.

    Raises:
        UnsupportedError: no such case, no GPU to hold it, or a file of another GPU.
        RedOpError: an op fails its conformance.
    """
    if args.table is not None:
        print(report(load(args.table)))
        return 0
    begin = time.monotonic()
    config, budget = preset(args.model), int(args.cache_gb * 1e9)
    plan = _matching(planned(config, args.contexts, args.batch, budget), args.cases)
    if args.list:
        print("\n".join(case.name for case in plan))
        return 0
    device = _device(args.model)
    env = environment(device, {}, args.commit)
    target = None if args.save is None else path_for(args.save, env, RESULTS, "contexts")
    if target is not None and target.exists():
        require_comparable(load(target).env, env, target)
    rates = measure_ceilings(device, stopwatch(device))
    env |= {"model": args.model, "ceilings": rates._asdict()}
    if not args.unchecked:
        require_green_ops(device, plan)
        _tell(f"ops are green after {time.monotonic() - begin:.0f} s")
    bench = Bench(
        config=config,
        device=device,
        dtype=torch.bfloat16,
        rates=rates,
        budget_bytes=budget,
        settings=Settings(seconds=args.seconds),
        deadline_s=float("inf") if args.limit is None else begin + args.limit,
        commit=env["commit"],
        date=datetime.now(UTC).date().isoformat(),
        marks=[UNCHECKED] if args.unchecked else [],
    )
    return _measure(bench, plan, env, target, begin)


def _measure(
    bench: Bench, plan: list[Case], env: dict[str, Any], target: Path | None, begin: float
) -> int:
    results, failed = ResultFile(env, [], []), 0
    for row in bench.rows(plan):
        at = f"{time.monotonic() - begin:4.0f} s"
        if isinstance(row, Failed):
            failed += 1
            _tell(f"{at} {row.case.name}: failed: {row.why}")
            continue
        if target is not None:
            save(target, env, row)
        if isinstance(row, DecodeRow):
            results.decode.append(row)
        else:
            results.prefill.append(row)
        _tell(f"{at} {_line(row)}")
    print(report(results))
    return 1 if failed else 0


def _line(row: DecodeRow | PrefillRow) -> str:
    if isinstance(row, PrefillRow):
        return f"prefill of {row.context:,} tokens: {row.seconds:.1f} s, finite: {row.finite}"
    kernels = "" if row.kernels_ms is None else f", kernels {row.kernels_ms:.3f}"
    return (
        f"{row.stack} {row.context:,} x {row.num_sequences}: {row.step_ms:.3f} ms"
        f" ({row.of_roofline:.0%} of the roofline{kernels}, steady {row.steady_ms:.3f})"
    )


def _matching(plan: list[Case], patterns: tuple[str, ...]) -> list[Case]:
    found = [case for case in plan if any(fnmatchcase(case.name, each) for each in patterns)]
    if not found:
        raise UnsupportedError(f"no case matches {','.join(patterns)}; --list names all")
    return found


def _device(model: str) -> torch.device:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    if model.startswith("kimi") and memory < LEAST_GPU_BYTES:
        raise UnsupportedError(f"{model}'s layers and their cache need a GPU with 140 GB")
    return device


def _tell(text: str) -> None:
    print(f"perilune: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The command alone, without what `perilune` imports for the others."""
    parser = argparse.ArgumentParser(prog="python -m perilune.cli.bench_contexts")
    add_contexts_options(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
