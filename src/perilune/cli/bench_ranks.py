"""`perilune bench ranks`: layers shared by the GPUs of a host, beside the same layers on one.

Where torch is installed and the server's packages are not, as on a bare GPU machine:
`python -m perilune.cli.bench_ranks`, with the same options.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from perilune.cli.bench_ranks_options import add_ranks_options
from perilune.cli.result_options import RESULTS, UNCHECKED
from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.ceilings import measure_ceilings
from perilune.kernels.bench.environment import environment, require_comparable
from perilune.kernels.bench.results import Row, describe, load, path_for, save
from perilune.kernels.bench.rounds import Spread
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.bench.table import plain
from perilune.model.presets import preset
from perilune.model.rank_bench import Measured, RankBench, planned
from perilune.model.ranks import Ranks, meet, share_of

UNEQUAL = "NOT EQUAL"


def run(args: argparse.Namespace) -> int:
    """1 where ranks differ from one GPU, or from one another.

    Raises:
        UnsupportedError: fewer GPUs than ranks, or a file of other ones.
        ConfigError: the ranks cannot have equal parts of the model.
    """
    share_of(preset(args.model), Ranks(0, args.ranks))
    gpus = torch.cuda.device_count()
    if 0 < gpus < args.ranks:
        raise UnsupportedError(f"{args.ranks} ranks need as many GPUs; here are {gpus}")
    with tempfile.TemporaryDirectory() as folder:
        # Where one rank fails it ends the others, and raises what that one did.
        torch.multiprocessing.spawn(_rank, (args, Path(folder)), nprocs=args.ranks)
        env, rows = load(Path(folder) / "rows.json")
    print(f"{describe(env)}, {args.ranks} ranks\n\n{plain(rows)}")
    return 1 if any(UNEQUAL in row.marks for row in rows) else 0


def _rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    env = environment(device, {}, args.commit) | {"model": args.model, "ranks": args.ranks}
    target = None if args.save is None else path_for(args.save, env, RESULTS, "ranks")
    if target is not None and target.exists():
        require_comparable(load(target).env, env, target)
    rates = measure_ceilings(device, stopwatch(device))
    env["ceilings"] = rates._asdict()
    bench = RankBench(
        config=preset(args.model),
        context=args.context,
        ranks=meet(rank, args.ranks, folder / "store", device),
        device=device,
        rates=rates,
        rounds=args.rounds,
        checked=not args.unchecked,
    )
    for case in planned(bench.config, args.batch):
        measured = bench.measure(case)
        if rank == 0:
            rows = _rows(measured, bench, args.unchecked, env["commit"])
            for path in filter(None, (folder / "rows.json", target)):
                save(path, env, rows)
            print(f"perilune: {_line(measured)}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def _rows(measured: Measured, bench: RankBench, unchecked: bool, commit: str | None) -> list[Row]:
    """The whole, then its joints alone."""
    name, times = measured.case.name, measured.times

    def row(case: str, spread: Spread, **rest: Any) -> Row:
        median_ms, p10_ms, p90_ms = (1e3 * s for s in spread)
        return Row(
            op="ranks",
            case=case,
            backend=f"{bench.device.type} x{bench.ranks.size}",
            median_ms=median_ms,
            p10_ms=p10_ms,
            p90_ms=p90_ms,
            commit=commit,
            date=datetime.now(UTC).date().isoformat(),
            **rest,
        )

    whole = row(
        name,
        times.shared,
        floor_ms=1e3 * times.expected_s,
        peer="one GPU",
        peer_median_ms=1e3 * times.alone.median,
        ratio=times.alone.median / times.shared.median,
        inside="floor: the rank's own ops at the measured ceilings, and the joints' own times",
        marks=_marks(measured) + [UNCHECKED] * unchecked,
    )
    joints = [
        row(
            f"{name} {joint.name}",
            joint.spread,
            floor_ms=1e3 * joint.num_bytes / bench.rates.bytes_per_s,
            inside="floor: the result written once, in the GPU's own memory",
        )
        for joint in times.joints
    ]
    return [whole, *joints]


def _marks(measured: Measured) -> list[str]:
    errors = [f"{each.error:.1e} in {dtype}" for dtype, each in measured.equality.items()]
    marks = [f"from one GPU {', '.join(errors)}"]
    marks.append("ranks alike to the bit" if measured.equal else UNEQUAL)
    rerouted = max(each.rerouted for each in measured.equality.values())
    if rerouted:
        marks.append(f"{rerouted} tokens would have taken other experts")
    return marks


def _line(measured: Measured) -> str:
    times = measured.times
    shared, alone, expected = (
        1e3 * s for s in (times.shared.median, times.alone.median, times.expected_s)
    )
    word = "equal" if measured.equal else UNEQUAL
    beside = f"on one {alone:.3f}, expected {expected:.3f}"
    return f"{measured.case.name}: {shared:.3f} ms, {beside}; {word}"


def main() -> int:
    """The command alone, without what `perilune` imports for the others."""
    parser = argparse.ArgumentParser(prog="python -m perilune.cli.bench_ranks")
    add_ranks_options(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
