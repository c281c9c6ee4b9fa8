"""The options of `perilune bench ranks`: no torch is needed to list them."""

from __future__ import annotations

import argparse

from perilune.cli.result_options import add_result_options, add_unchecked, count


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="GPUs (%(default)s)")
    parser.add_argument("--model", default="kimi-k3", metavar="PRESET", help="(%(default)s)")
    parser.add_argument(
        "--batch",
        type=lambda text: tuple(count(part) for part in text.split(",")),
        default=(1, 32, 128),
        metavar="N,...",
        help="sequences that decode (1,32,128)",
    )
    parser.add_argument(
        "--context", type=count, default=8192, metavar="N", help="tokens of each (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=50, metavar="N", help="of a case (%(default)s)"
    )
    add_unchecked(parser)
    add_result_options(parser, "ranks")
