"""Options of commands that measure and keep results; no torch is needed to list them."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("benchmarks/results")
UNCHECKED = "ops not checked in this run"
"""The mark of rows that were measured with `--unchecked`."""


def add_unchecked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="do not check the ops first: they were, at this commit; rows are marked",
    )


def add_result_options(parser: argparse.ArgumentParser, what: str) -> None:
    """`what`: the first word of the file's name."""
    parser.add_argument("--commit", metavar="ID", help="of the source, outside a repository")
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FILE",
        help=f"keep the rows (default: {RESULTS}/{what}_GPU_YYYYMM.json)",
    )


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, up to 1e9")
    return value


def count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)
