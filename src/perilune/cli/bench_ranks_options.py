"""The options of `perilune bench ranks`: no torch is needed to list them."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("benchmarks/results")


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_count, default=2, metavar="N", help="GPUs (%(default)s)")
    parser.add_argument("--model", default="kimi-k3", metavar="PRESET", help="(%(default)s)")
    parser.add_argument(
        "--batch",
        type=lambda text: tuple(_count(part) for part in text.split(",")),
        default=(1, 32, 128),
        metavar="N,...",
        help="sequences that decode (1,32,128)",
    )
    parser.add_argument(
        "--context", type=_count, default=8192, metavar="N", help="tokens of each (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=_count, default=50, metavar="N", help="of a case (%(default)s)"
    )
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="do not check the ops first: they were, at this commit; rows are marked",
    )
    parser.add_argument("--commit", metavar="ID", help="of the source, outside a repository")
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FILE",
        help=f"keep the rows (default: {RESULTS}/ranks_GPU_YYYYMM.json)",
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)
