"""The options of `perilune bench prefix-cache`: no torch is needed to list them."""

from __future__ import annotations

import argparse
from pathlib import Path

from perilune.cli.local_model import positive_int
from perilune.gateway.load.traces import BLOCK_TOKENS


def add_prefix_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Mooncake JSON lines, or gzipped")
    parser.add_argument(
        "--model", default="nano", metavar="PRESET|DIR", help="sets the sizes (%(default)s)"
    )
    parser.add_argument(
        "--gb",
        type=_positives,
        default=(5.0, 10.0, 20.0, 40.0),
        metavar="GB,...",
        help="capacities of both pools together, in 10^9 bytes (5,10,20,40)",
    )
    parser.add_argument(
        "--state-share", type=float, default=0.1, metavar="X", help="of it for states (0.1)"
    )
    parser.add_argument(
        "--interval", type=int, default=8192, metavar="N", help="a state every N tokens (8192)"
    )
    parser.add_argument(
        "--align",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="a state at a prompt's last multiple of N; a trace tells no finer (%(default)s)",
    )
    parser.add_argument(
        "--max-cuts",
        type=positive_int,
        default=20,
        metavar="N",
        help="most states of a prompt (20)",
    )
    parser.add_argument(
        "--alpha", metavar="X", type=float, default=0.15, help="weight of FLOPs a byte (0.15)"
    )
    parser.add_argument("--requests", type=positive_int, metavar="N", help="the first N alone")


def _positives(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError("must be positive")
    return values
