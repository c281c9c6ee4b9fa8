"""The options of `perilune bench contexts`: no torch is needed to list them."""

from __future__ import annotations

import argparse
from pathlib import Path

from perilune.cli.result_options import add_result_options, add_unchecked, positive


def add_contexts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="kimi-k3", metavar="PRESET", help="(%(default)s)")
    parser.add_argument(
        "--contexts",
        type=_counts,
        default=(4096, 16384, 65536, 262144, 1048576),
        metavar="N,...",
        help="tokens of each sequence (4096 to 1048576, in powers of four)",
    )
    parser.add_argument(
        "--batch",
        type=_counts,
        default=(4, 64),
        metavar="N,...",
        help="sequences, where all three stacks hold so many (4,64)",
    )
    parser.add_argument(
        "--cache-gb",
        type=positive,
        default=70.0,
        metavar="GB",
        help="10^9 bytes of cache that are filled in any case (70)",
    )
    parser.add_argument(
        "--cases",
        type=lambda text: tuple(text.split(",")),
        default=("*",),
        metavar="PATTERN,...",
        help="only those whose names match, such as 'hybrid_*' or '*_prefill'",
    )
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument(
        "--seconds", type=positive, default=1.0, metavar="S", help="of a case's rounds (1)"
    )
    parser.add_argument(
        "--limit", type=positive, metavar="S", help="begin no case after so many seconds"
    )
    add_unchecked(parser)
    add_result_options(parser, "contexts")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only print a result file as Markdown"
    )


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError("must be positive")
    return values
